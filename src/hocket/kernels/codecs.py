"""Encoding and decoding of vectors of float32, one pass each, in buckets that have a scale of their own."""

from __future__ import annotations

from typing import Any

import numpy as np

from hocket.kernels.arrays import Floats, Integers
from hocket.kernels.jit import kernel

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_STRIDE = 16
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
def _largest(x: Floats) -> Any:
    largest = np.float32(0.0)
    for i in range(x.size):
        largest = max(largest, abs(x[i]))
    return largest


# A bucket is a slice that begins at 0: only of such loops does the compiler know that no index is negative, without
# which it could not take several values at once.


@kernel
def encode_levels(x: Floats, scales: Floats, out: Bytes, bits: int, bucket: int, seed: int, stochastic: bool) -> None:
    """Levels -s ... s of the bucket's largest value, rounded to the nearest or without bias, `bits` a level."""
    s = np.float32(2 ** (bits - 1) - 1)
    for b in range(scales.size):
        begin = b * bucket
        values = x[begin : begin + bucket]
        levels = out[begin * bits // 8 : (begin + bucket) * bits // 8]
        largest = _largest(values)
        scales[b] = largest
        inverse = s / largest if largest > np.float32(1e-37) else np.float32(0.0)
        if not stochastic:
            _nearest(values, levels, inverse)
        elif bits == 8:
            _bytes(values, levels, inverse, seed + begin)
        elif bits == 4:
            _halves(values, levels, inverse, seed + begin)
        else:
            _quarters(values, levels, inverse, seed + begin)


@kernel
def _nearest(x: Floats, out: Bytes, inverse: Any) -> None:
    for i in range(x.size):
        out[i] = np.int32(x[i] * inverse + np.float32(127.5))


@kernel
def _level(x: Any, inverse: Any, s: Any, i: int, seed: int) -> Any:
    return min(np.int32(x * inverse + s + noise(i, seed)), np.int32(2 * s))


@kernel
def _bytes(x: Floats, out: Bytes, inverse: Any, seed: int) -> None:
    for i in range(x.size):
        out[i] = _level(x[i], inverse, np.float32(127), i, seed)


@kernel
def _halves(x: Floats, out: Bytes, inverse: Any, seed: int) -> None:
    s = np.float32(7)
    for j in range(x.size // 2):
        low = _level(x[2 * j], inverse, s, 2 * j, seed)
        high = _level(x[2 * j + 1], inverse, s, 2 * j + 1, seed)
        out[j] = low | high << np.int32(4)
    if x.size % 2:
        out[x.size // 2] = _level(x[x.size - 1], inverse, s, x.size - 1, seed)


@kernel
def _quarters(x: Floats, out: Bytes, inverse: Any, seed: int) -> None:
    s = np.float32(1)
    for j in range(x.size // 4):
        packed = np.int32(0)
        for part in range(4):
            packed |= _level(x[4 * j + part], inverse, s, 4 * j + part, seed) << np.int32(2 * part)
        out[j] = packed
    if x.size % 4:
        packed = np.int32(0)
        for i in range(x.size - x.size % 4, x.size):
            packed |= _level(x[i], inverse, s, i, seed) << np.int32(2 * (i % 4))
        out[x.size // 4] = packed


@kernel
def decode_levels(scales: Floats, block: Bytes, out: Floats, bits: int, bucket: int) -> None:
    s = np.float32(2 ** (bits - 1) - 1)
    for b in range(scales.size):
        begin = b * bucket
        levels = block[begin * bits // 8 : (begin + bucket) * bits // 8]
        values = out[begin : begin + bucket]
        unit = scales[b] / s
        if bits == 8:
            for i in range(values.size):
                values[i] = (np.float32(np.int32(levels[i])) - s) * unit
        elif bits == 4:
            _from_parts(levels, values, 4, s, unit)
        else:
            _from_parts(levels, values, 2, s, unit)


@kernel(inline="always")
def _from_parts(block: Bytes, out: Floats, bits: int, s: Any, unit: Any) -> None:
    many, mask = 8 // bits, np.int32(2**bits - 1)
    for j in range(out.size // many):
        for part in range(many):
            level = (np.int32(block[j]) >> np.int32(part * bits)) & mask
            out[j * many + part] = (np.float32(level) - s) * unit
    for i in range(out.size - out.size % many, out.size):
        level = (np.int32(block[i // many]) >> np.int32(i % many * bits)) & mask
        out[i] = (np.float32(level) - s) * unit


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
    for j in range(full):
        packed = np.uint32(0)
        for part in range(8):
            packed |= (np.uint32(~bits[j * 8 + part]) >> np.uint32(31)) << np.uint32(part)
        out[j] = packed
    if bits.size % 8:
        packed = np.uint32(0)
        for i in range(full * 8, bits.size):
            packed |= (np.uint32(~bits[i]) >> np.uint32(31)) << np.uint32(i % 8)
        out[full] = packed


@kernel
def unpack_signs(block: Bytes, low: Floats, high: Floats, out: Floats, bucket: int) -> None:
    """The bucket's high value for a 1, its low one for a 0."""
    for b in range(high.size):
        _from_signs(block[b * bucket // 8 :], low[b], high[b], out[b * bucket : (b + 1) * bucket])


@kernel
def _from_signs(block: Bytes, low: Any, high: Any, out: Floats) -> None:
    for j in range(out.size // 8):
        packed = np.int32(block[j])
        for part in range(8):
            out[j * 8 + part] = high if packed & np.int32(1 << part) else low
    for i in range(out.size - out.size % 8, out.size):
        out[i] = high if np.int32(block[i // 8]) & np.int32(1 << i % 8) else low


@kernel(fastmath=True)
def bucket_means(x: Floats, low: Floats, high: Floats, bucket: int) -> None:
    """Of each bucket: the mean of those below zero, and of the others."""
    for b in range(high.size):
        values = x[b * bucket : (b + 1) * bucket]
        total, absolute, below = np.float32(0.0), np.float32(0.0), np.int32(0)
        for i in range(values.size):
            total += values[i]
            absolute += abs(values[i])
            below += np.int32(values[i] < 0)
        above = np.int32(values.size) - below
        high[b] = (absolute + total) / np.float32(2 * above) if above else np.float32(0.0)
        low[b] = (total - absolute) / np.float32(2 * below) if below else np.float32(0.0)


@kernel
def at_least(x: Floats, threshold: float, found: Integers) -> int:
    """The places of all whose size reaches a threshold, in order; their number, also where `found` has no room."""
    count = 0
    limit = np.float32(threshold)
    for begin in range(0, x.size, _STRIDE):
        values = x[begin : begin + _STRIDE]
        if _largest(values) < limit:
            continue
        for i in range(values.size):
            if abs(values[i]) >= limit:
                if count < found.size:
                    found[count] = begin + i
                count += 1
    return count


@kernel(fastmath=True)
def bucket_sizes(x: Floats, sizes: Floats, bucket: int) -> None:
    """Of each bucket: the mean size."""
    for b in range(sizes.size):
        values = x[b * bucket : (b + 1) * bucket]
        total = np.float32(0.0)
        for i in range(values.size):
            total += abs(values[i])
        sizes[b] = total / np.float32(values.size)
