"""Seeds for independent streams of random numbers, derived from the one seed of a run."""

from __future__ import annotations

import hashlib
import json


def stream(seed: int, purpose: str, *numbers: int) -> int:
    """A seed of 63 bits for one purpose (and rank, epoch ...), the same on every machine and in every version.

    A hash, so that no two purposes share a stream as they would under sums such as `seed * 1_000_003 + rank`.
    """
    text = json.dumps([seed, purpose, *numbers])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
