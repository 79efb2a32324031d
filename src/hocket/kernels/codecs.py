"""Encoding and decoding of vectors of float32, one pass each, in buckets that have a scale of their own."""

from __future__ import annotations

from typing import Any

import numpy as np

from hocket.kernels.arrays import Floats, Integers
from hocket.kernels.jit import kernel

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_STRIDE = 64
"""Elements that are looked at together, to skip those without a large one."""


@kernel
def noise(i: int, seed: int) -> Any:
    """A number in [0, 1) for each place and seed: a hash (Wellons' lowbias32), so that it needs no state."""
    h = np.uint32(i) ^ np.uint32(seed)
    h = np.uint32(h ^ (h >> np.uint32(16)))
    h = np.uint32(h * np.uint32(0x7FEB352D))
    h = np.uint32(h ^ (h >> np.uint32(15)))
    h = np.uint32(h * np.uint32(0x846CA68B))
    h = np.uint32(h ^ (h >> np.uint32(16)))
    return np.float32(np.int32(h >> np.uint32(8))) * np.float32(2.0**-24)


@kernel
def all_finite(bits: Any) -> bool:
    """Whether no exponent is that of NaN or infinity; `bits` are the floats as int32."""
    worst = np.int32(0)
    for i in range(bits.size):
        worst = max(worst, bits[i] & np.int32(0x7F800000))
    return bool(worst < 0x7F800000)


@kernel(fastmath=True)
def _largest(x: Floats, begin: int, end: int) -> Any:
    largest = np.float32(0.0)
    for i in range(begin, end):
        largest = max(largest, abs(x[i]))
    return largest


@kernel
def encode_levels(x: Floats, scales: Floats, out: Bytes, bits: int, bucket: int, seed: int, stochastic: bool) -> None:
    """Levels -s ... s of the bucket's largest value, rounded to the nearest or without bias, `bits` a level."""
    s = np.float32(2 ** (bits - 1) - 1)
    top = np.int32(2 * s)
    many = 8 // bits
    for b in range(scales.size):
        begin, end = b * bucket, min((b + 1) * bucket, x.size)
        largest = _largest(x, begin, end)
        scales[b] = largest
        inverse = s / largest if largest > np.float32(1e-37) else np.float32(0.0)
        if bits == 8:
            if stochastic:
                for i in range(begin, end):
                    out[i] = min(np.int32(x[i] * inverse + s + noise(i, seed)), top)
            else:
                for i in range(begin, end):
                    out[i] = min(np.int32(x[i] * inverse + s + np.float32(0.5)), top)
            continue
        for at in range(begin // many, (end + many - 1) // many):
            packed = np.int32(0)
            for part in range(min(many, end - at * many)):
                i = at * many + part
                packed |= min(np.int32(x[i] * inverse + s + noise(i, seed)), top) << np.int32(part * bits)
            out[at] = packed


@kernel
def decode_levels(scales: Floats, block: Bytes, out: Floats, bits: int, bucket: int) -> None:
    s = np.float32(2 ** (bits - 1) - 1)
    many, mask = 8 // bits, np.int32(2**bits - 1)
    for b in range(scales.size):
        begin, end = b * bucket, min((b + 1) * bucket, out.size)
        unit = scales[b] / s
        if bits == 8:
            for i in range(begin, end):
                out[i] = (np.float32(np.int32(block[i])) - s) * unit
            continue
        for at in range(begin // many, (end + many - 1) // many):
            packed = np.int32(block[at])
            for part in range(min(many, end - at * many)):
                out[at * many + part] = (np.float32((packed >> np.int32(part * bits)) & mask) - s) * unit


@kernel
def encode_powers(bits: Any, signs: Bytes, exponents: Bytes, seed: int) -> None:
    """The sign and the exponent of each float, one up with the chance that the mantissa says."""
    for i in range(bits.size):
        exponent = (bits[i] >> np.int32(23)) & np.int32(0xFF)
        mantissa = np.float32(bits[i] & np.int32(0x7FFFFF)) * np.float32(2.0**-23)
        up = np.int32(noise(i, seed) < mantissa)
        exponents[i] = min(exponent + up, np.int32(254)) if exponent > 0 else np.int32(0)
        signs[i] = bits[i] < 0


@kernel
def pack_signs(bits: Any, out: Bytes) -> None:
    """One bit a float, the first lowest: 1 where it is not negative."""
    full = bits.size // 8
    for at in range(full):
        packed = np.uint32(0)
        for part in range(8):
            packed |= (np.uint32(~bits[at * 8 + part]) >> np.uint32(31)) << np.uint32(part)
        out[at] = packed
    for i in range(full * 8, bits.size):
        if i % 8 == 0:
            out[i // 8] = 0
        out[i // 8] |= np.uint8((np.uint32(~bits[i]) >> np.uint32(31)) << np.uint32(i % 8))


@kernel
def unpack_signs(block: Bytes, low: Floats, high: Floats, out: Floats, bucket: int) -> None:
    """The bucket's high value for a 1, its low one for a 0."""
    for b in range(high.size):
        for i in range(b * bucket, min((b + 1) * bucket, out.size)):
            out[i] = high[b] if (block[i >> 3] >> np.uint8(i & 7)) & np.uint8(1) else low[b]


@kernel(fastmath=True)
def bucket_means(x: Floats, low: Floats, high: Floats, bucket: int) -> None:
    """Of each bucket: the mean of those below zero, and of the others."""
    for b in range(high.size):
        begin, end = b * bucket, min((b + 1) * bucket, x.size)
        total, absolute, below = np.float32(0.0), np.float32(0.0), np.int32(0)
        for i in range(begin, end):
            total += x[i]
            absolute += abs(x[i])
            below += np.int32(x[i] < 0)
        above = np.int32(end - begin) - below
        high[b] = (absolute + total) / np.float32(2 * above) if above else np.float32(0.0)
        low[b] = (total - absolute) / np.float32(2 * below) if below else np.float32(0.0)


@kernel
def at_least(x: Floats, threshold: float, found: Integers) -> int:
    """The places of all whose size reaches a threshold, in order; their number, also where `found` has no room."""
    count = 0
    limit = np.float32(threshold)
    for begin in range(0, x.size, _STRIDE):
        end = min(begin + _STRIDE, x.size)
        if _largest(x, begin, end) < limit:
            continue
        for i in range(begin, end):
            if abs(x[i]) >= limit:
                if count < found.size:
                    found[count] = i
                count += 1
    return count


@kernel(fastmath=True)
def bucket_sizes(x: Floats, sizes: Floats, bucket: int) -> None:
    """Of each bucket: the mean size."""
    for b in range(sizes.size):
        begin, end = b * bucket, min((b + 1) * bucket, x.size)
        total = np.float32(0.0)
        for i in range(begin, end):
            total += abs(x[i])
        sizes[b] = total / np.float32(end - begin)
