"""A few of all values: the largest, some at random, those above a threshold."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from hocket.compress import indices
from hocket.compress.casts import Half
from hocket.compress.scheme import Biased, Compressor, array, as_bytes, check_memory, compressor, floats
from hocket.core.errors import UserError
from hocket.core.registry import filled_in

Array = np.ndarray[Any, Any]


def kept(ratio: float, n: int) -> int:
    """How many of `n` values a ratio stands for: one at least, if there is any."""
    return min(n, max(1, round(ratio * n)))


def check_ratio(scheme: Compressor, ratio: float) -> None:
    if not 0 < ratio <= 1:
        raise UserError(f"compressor {scheme.name}: ratio must be greater than 0 and at most 1, got {ratio:g}")


@dataclass(frozen=True)
class Scaled(Half):
    """16 bits a value, after a division by the largest: so that nothing is too small or too large for them."""

    name: ClassVar[str] = "scaled"

    def size(self, n: int) -> int:
        return super().size(n) + 4 * (n > 0)

    def encode(self, x: Tensor, seed: int) -> Tensor:
        if not x.numel():
            return super().encode(x, seed)
        scale = x.abs().max().reshape(1)
        return torch.cat([as_bytes(scale), super().encode(x / scale.clamp(min=1e-37), seed)])

    def decode(self, block: Tensor, n: int) -> Tensor:
        return super().decode(block[4:], n) * floats(block, 0, 1) if n else torch.empty(0)


@dataclass(frozen=True)
class Chosen(Biased):
    """Sends places and values: a count, the places, the values, these encoded again."""

    travels: ClassVar[Literal["gathered"]] = "gathered"
    values: Compressor = filled_in(Scaled())  # noqa: RUF009 - it is frozen

    @abstractmethod
    def choose(self, x: Array) -> Array:
        """The places of the values to send, in order."""

    def size(self, n: int) -> int | None:
        return None

    def _size(self, n: int, k: int) -> int | None:
        values = self.values.size(k)
        return None if values is None else 4 + indices.size(n, k) + values

    def encode(self, x: Tensor, seed: int) -> Tensor:
        places = self.choose(array(x))
        values = self.values.encode(x[torch.from_numpy(places)], seed)
        head = np.frombuffer(np.uint32(places.size).tobytes() + indices.encode(places, x.numel()).tobytes(), np.uint8)
        return torch.cat([torch.from_numpy(head.copy()), values])

    def found(self, block: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """The places and the values in these bytes."""
        raw = array(block)
        k = int.from_bytes(raw[:4].tobytes(), "little")
        end = 4 + indices.size(n, k)
        return torch.from_numpy(indices.decode(raw[4:end], n, k)), self.values.decode(block[end:].clone(), k)

    def decode(self, block: Tensor, n: int) -> Tensor:
        places, values = self.found(block, n)
        return torch.zeros(n).index_copy_(0, places, values)

    def add_to(self, total: Tensor, block: Tensor) -> None:
        places, values = self.found(block, total.numel())
        total[places] += values.to(total.dtype)  # no place is there twice


@compressor("topk")
@dataclass(frozen=True)
class TopK(Chosen):
    """The largest values, as many as `ratio` says, in 16 bits unless chained (Aji 2017, Stich 2018)."""

    first: ClassVar[str] = "ratio"
    ratio: float = 0.01

    @property
    def arrives(self) -> float:
        return self.ratio

    def check(self) -> None:
        super().check()
        check_ratio(self, self.ratio)

    def size(self, n: int) -> int | None:
        return self._size(n, kept(self.ratio, n))

    def choose(self, x: Array) -> Array:
        return largest(x, kept(self.ratio, x.size))


@compressor("threshold")
@dataclass(frozen=True)
class Threshold(Chosen):
    """All values of at least the size `tau` (Strom 2015, but with their own sizes), in 16 bits unless chained."""

    first: ClassVar[str] = "tau"
    tau: float = 0.001

    @property
    def arrives(self) -> float:
        return 0.05

    def check(self) -> None:
        super().check()
        if self.tau <= 0:
            raise UserError(f"compressor threshold: tau must be greater than 0, got {self.tau:g}")

    def choose(self, x: Array) -> Array:
        return above(x, self.tau)


@compressor("randomk")
@dataclass(frozen=True)
class RandomK(Compressor):
    """Values at random places, each times 1 / `ratio` so that the mean is right; with feedback=on as they are."""

    travels: ClassVar[Literal["gathered"]] = "gathered"
    first: ClassVar[str] = "ratio"
    ratio: float = 0.01
    feedback: Literal["on", "off"] = "off"
    decay: float = 1.0
    values: Compressor = filled_in(Scaled())  # noqa: RUF009 - it is frozen

    @property
    def variance(self) -> float:
        return 0.0 if self.feedback == "on" else 1 / self.ratio - 1

    @property
    def arrives(self) -> float:
        return self.ratio

    def check(self) -> None:
        check_memory(self)
        check_ratio(self, self.ratio)

    def size(self, n: int) -> int | None:
        values = self.values.size(kept(self.ratio, n))
        return None if values is None else 8 * (n > 0) + values

    def _places(self, seed: int, n: int) -> Tensor:
        """Both sides draw them from the seed, which travels in their place."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(n, generator=generator)[: kept(self.ratio, n)]

    def _scale(self, n: int) -> float:
        return 1.0 if self.feedback == "on" else n / kept(self.ratio, n)

    def encode(self, x: Tensor, seed: int) -> Tensor:
        n = x.numel()
        if n == 0:
            return torch.empty(0, dtype=torch.uint8)
        chosen = x[self._places(seed, n)] * self._scale(n)
        return torch.cat([as_bytes(torch.tensor([seed])), self.values.encode(chosen, seed)])

    def decode(self, block: Tensor, n: int) -> Tensor:
        if n == 0:
            return torch.empty(0)
        seed = int(block[:8].clone().view(torch.int64))
        values = self.values.decode(block[8:].clone(), kept(self.ratio, n))
        return torch.zeros(n).index_copy_(0, self._places(seed, n), values)


def largest(x: Array, k: int) -> Array:
    """The places of the `k` largest, in order; of equal ones the first, so that there are always `k`.

    A hundredth of the values, at even distances, tells about how large the smallest of them is; then one pass finds
    all candidates (Lin 2018, section 3.1).
    """
    if k >= x.size:
        return np.arange(x.size)
    candidates, threshold = None, _guess(x, k)
    while candidates is None or candidates.size < k:
        candidates = above(x, threshold, expected=2 * k)
        threshold = threshold / 2 if threshold > 1e-37 else 0.0
    sizes = np.abs(x[candidates])
    last = np.partition(sizes, sizes.size - k)[sizes.size - k]
    chosen: Array = sizes > last
    chosen[np.flatnonzero(sizes == last)[: k - np.count_nonzero(chosen)]] = True
    places: Array = candidates[chosen]
    return places


def _guess(x: Array, k: int) -> float:
    """A size that somewhat more than `k` values reach."""
    sample = np.abs(x[:: 100 if x.size >= 50_000 else 1])
    wanted = min(sample.size, math.ceil(k * sample.size / x.size * 1.1) + (3 if sample.size < x.size else 0))
    return float(np.partition(sample, sample.size - wanted)[sample.size - wanted])


def above(x: Array, threshold: float, expected: int = 0) -> Array:
    """The places of all whose size reaches a threshold, in order."""
    from hocket.kernels import codecs  # Numba takes half a second to import

    found = np.empty(min(x.size, expected or max(64, x.size // 16)), np.int64)
    count = codecs.at_least(x, threshold, found)
    if count > found.size:
        found = np.empty(count, np.int64)
        codecs.at_least(x, threshold, found)
    return found[:count]
