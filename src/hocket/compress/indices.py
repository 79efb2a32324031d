"""Places in a vector, in few bits: Elias and Fano's code, whose size depends on their number alone."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def _low_bits(n: int, k: int) -> int:
    return max(0, (n // k).bit_length() - 1) if k else 0


def size(n: int, k: int) -> int:
    """Bytes of `k` places in a vector of `n`."""
    low = _low_bits(n, k)
    return -(-k * low // 8) + -(-(k + (n >> low)) // 8) if k else 0


def encode(places: Array, n: int) -> Array:
    """Of each place, which are in order, the low bits as they are, and the high ones as zeros before a one."""
    k = places.size
    if k == 0:
        return np.empty(0, np.uint8)
    low = _low_bits(n, k)
    bits = (places[:, None] >> np.arange(low)) & 1
    high = np.zeros(k + (n >> low), np.uint8)
    high[(places >> low) + np.arange(k)] = 1
    return np.concatenate([np.packbits(bits.astype(np.uint8).reshape(-1)), np.packbits(high)])


def decode(block: Array, n: int, k: int) -> Array:
    if k == 0:
        return np.empty(0, np.int64)
    low = _low_bits(n, k)
    split = -(-k * low // 8)
    bits = np.unpackbits(block[:split], count=k * low).reshape(k, low).astype(np.int64)
    high = np.flatnonzero(np.unpackbits(block[split:], count=k + (n >> low))) - np.arange(k)
    places: Array = (high << low) + (bits << np.arange(low)).sum(axis=1)
    return places
