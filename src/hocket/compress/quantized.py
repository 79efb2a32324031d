"""A few bits a value: levels between the smallest and the largest of a bucket."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hocket.compress.scheme import Biased, Compressor, array, compressor, floats
from hocket.core.errors import UserError


def buckets(n: int, bucket: int) -> int:
    return -(-n // bucket)


class Levels(Compressor):
    """Levels of a bucket's largest value: first the scales, then the levels, side by side in bytes."""

    @abstractmethod
    def form(self) -> tuple[int, int, bool]:
        """Bits a value, values a bucket, and whether it rounds at random, without bias."""

    @property
    def variance(self) -> float:
        bits, bucket, stochastic = self.form()
        levels = 2 ** (bits - 1) - 1
        return min(bucket / levels**2, math.sqrt(bucket) / levels) if stochastic else 0.0

    def size(self, n: int) -> int:
        bits, bucket, _ = self.form()
        return 4 * buckets(n, bucket) + -(-n * bits // 8)

    def encode(self, x: Tensor, seed: int) -> Tensor:
        from hocket.kernels import codecs  # Numba takes half a second to import

        bits, bucket, stochastic = self.form()
        count = 4 * buckets(x.numel(), bucket)
        block = torch.empty(self.size(x.numel()), dtype=torch.uint8)
        scales = block[:count].view(torch.float32)
        codecs.encode_levels(
            array(x), scales.numpy(), block[count:].numpy(), bits, bucket, seed & 0x7FFFFFFF, stochastic
        )
        return block

    def decode(self, block: Tensor, n: int) -> Tensor:
        from hocket.kernels import codecs

        bits, bucket, _ = self.form()
        count = buckets(n, bucket)
        out = torch.empty(n)
        codecs.decode_levels(floats(block, 0, count).numpy(), array(block[4 * count :]), out.numpy(), bits, bucket)
        return out


@compressor("int8")
@dataclass(frozen=True)
class Int8(Biased, Levels):
    """8 bits a value, rounded to the nearest of 255 levels; 512 values share a scale."""

    def form(self) -> tuple[int, int, bool]:
        return 8, 512, False


@compressor("qsgd")
@dataclass(frozen=True)
class QSGD(Levels):
    """2, 4 or 8 bits a value, rounded at random so that the mean is right (Alistarh 2017), by the largest value."""

    bits: int = 4

    def check(self) -> None:
        if self.bits not in (2, 4, 8):
            raise UserError(f"compressor qsgd: bits must be 2, 4 or 8, got {self.bits}")

    def form(self) -> tuple[int, int, bool]:
        return self.bits, 128 if self.bits == 2 else 512, True


@compressor("terngrad")
@dataclass(frozen=True)
class TernGrad(Levels):
    """-1, 0 or 1 times the largest value, at random so that the mean is right (Wen 2017); 2 bits a value."""

    clip: float = 2.5
    """Standard deviations at which larger values are cut off first; 0 cuts nothing off, and has no bias."""

    def check(self) -> None:
        if self.clip < 0:
            raise UserError(f"compressor terngrad: clip must be 0 or more, got {self.clip:g}")

    def form(self) -> tuple[int, int, bool]:
        return 2, 2048, True

    def encode(self, x: Tensor, seed: int) -> Tensor:
        if self.clip and x.numel() > 1:
            limit = self.clip * float(x.std())
            x = x.clamp(-limit, limit)
        return super().encode(x, seed)


@compressor("natural")
@dataclass(frozen=True)
class Natural(Compressor):
    """A power of two, the one below or above at random so that the mean is right (Horvath 2019); 9 bits a value."""

    @property
    def variance(self) -> float:
        return 1 / 8

    def size(self, n: int) -> int:
        return n + -(-n // 8)

    def encode(self, x: Tensor, seed: int) -> Tensor:
        from hocket.kernels import codecs

        exponents, signs = torch.empty((2, x.numel()), dtype=torch.uint8)
        codecs.encode_powers(array(x).view("int32"), signs.numpy(), exponents.numpy(), seed & 0x7FFFFFFF)
        return torch.cat([exponents, packed_bits(signs)])

    def decode(self, block: Tensor, n: int) -> Tensor:
        bits = block[:n].to(torch.int32) << 23
        bits |= unpacked_bits(block[n:], n).to(torch.int32) << 31
        return bits.view(torch.float32)


def packed_bits(bits: Tensor) -> Tensor:
    """Eight to a byte."""
    return torch.from_numpy(np.packbits(array(bits), bitorder="little"))


def unpacked_bits(block: Tensor, n: int) -> Tensor:
    return torch.from_numpy(np.unpackbits(array(block), count=n, bitorder="little"))
