"""Seeds for many streams of random numbers from the one that the user gave."""

from __future__ import annotations

import hashlib


def stream(seed: int, purpose: str, *numbers: int) -> int:
    """A seed of 63 bits for one purpose: streams with different purposes or numbers have nothing in common."""
    text = "/".join([str(seed), purpose, *map(str, numbers)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1
