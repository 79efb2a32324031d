"""One bit a value: its sign, and what the values of a bucket are like."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hocket.compress.quantized import buckets
from hocket.compress.scheme import Biased, array, compressor, floats

BUCKET = 2048
"""Values that share a scale."""


@compressor("onebit")
@dataclass(frozen=True)
class OneBit(Biased):
    """The sign of each value, and of each bucket the mean of the negative and of the other values (Seide 2014)."""

    @property
    def arrives(self) -> float:
        return 0.5

    def size(self, n: int) -> int:
        return 8 * buckets(n, BUCKET) + -(-n // 8)

    def encode(self, x: Tensor, seed: int) -> Tensor:
        from hocket.kernels import codecs  # Numba takes half a second to import

        values, count = array(x), buckets(x.numel(), BUCKET)
        block = torch.empty(self.size(x.numel()), dtype=torch.uint8)
        low, high = block[: 8 * count].view(torch.float32).view(2, count)
        codecs.bucket_means(values, low.numpy(), high.numpy(), BUCKET)
        codecs.pack_signs(values.view("int32"), block[8 * count :].numpy())
        return block

    def decode(self, block: Tensor, n: int) -> Tensor:
        count = buckets(n, BUCKET)
        low, high = floats(block, 0, 2 * count).view(2, count)
        return _decoded(block[8 * count :], low, high, n)


@compressor("sign")
@dataclass(frozen=True)
class Sign(Biased):
    """The sign of each value times the bucket's mean size (scaled signSGD; with feedback EF-sign, Karimireddy 2019)."""

    @property
    def arrives(self) -> float:
        return 0.5

    def size(self, n: int) -> int:
        return 4 * buckets(n, BUCKET) + -(-n // 8)

    def encode(self, x: Tensor, seed: int) -> Tensor:
        from hocket.kernels import codecs

        values, count = array(x), buckets(x.numel(), BUCKET)
        block = torch.empty(self.size(x.numel()), dtype=torch.uint8)
        codecs.bucket_sizes(values, block[: 4 * count].view(torch.float32).numpy(), BUCKET)
        codecs.pack_signs(values.view("int32"), block[4 * count :].numpy())
        return block

    def decode(self, block: Tensor, n: int) -> Tensor:
        count = buckets(n, BUCKET)
        scale = floats(block, 0, count)
        return _decoded(block[4 * count :], -scale, scale, n)


def _decoded(signs: Tensor, low: Tensor, high: Tensor, n: int) -> Tensor:
    from hocket.kernels import codecs

    out = torch.empty(n)
    codecs.unpack_signs(array(signs), array(low), array(high), out.numpy(), BUCKET)
    return out
