"""Deep gradient compression."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

import numpy as np
from torch import Tensor

from hocket.compress.scheme import Vectors, compressor
from hocket.compress.sparsified import Array, TopK, kept, largest
from hocket.core.errors import UserError

STAGES = 4
"""Steps in which the ratio falls to its end: 25, 6.3, 1.6, 0.4, 0.1 %."""


@compressor("dgc")
@dataclass(frozen=True)
class DGC(TopK):
    """Top-k whose memory holds momentum, with fewer values from stage to stage (Lin 2018).

    Where gradients are averaged, the optimizer's momentum moves here: u <- m u + g, v <- v + u, the largest of v are
    sent, and u and v begin anew there (momentum correction, factor masking). Elsewhere it is top-k with the stages.
    Of a whole model the largest are those of each layer.
    """

    takes_momentum: ClassVar[bool] = True
    ratio: float = 0.001
    ramp: int = 16
    """Steps over which the ratio falls from 25 % to its end; 0 begins with that."""
    clip: float = 0.0
    """The norm of the gradient of all workers beyond which each clips its own, to clip / sqrt(workers); 0 is never."""

    def check(self) -> None:
        super().check()
        if self.ramp < 0 or self.clip < 0:
            raise UserError(f"compressor dgc: ramp and clip must be 0 or more, got {self.ramp} and {self.clip:g}")

    def at(self, step: int) -> DGC:
        stage = STAGES if step >= self.ramp else STAGES * step // self.ramp
        if stage == STAGES or self.ratio >= 0.25:
            return self
        return dataclasses.replace(self, ratio=0.25 * (self.ratio / 0.25) ** (stage / STAGES))

    def layered(self, lengths: Sequence[int]) -> DGC:
        return _LayerByLayer(**vars(self), lengths=tuple(lengths))

    def before(self, vectors: Vectors, name: str, x: Tensor, momentum: float, ranks: int) -> Tensor:
        if self.clip:
            limit = self.clip / ranks**0.5
            x = x * min(1.0, limit / max(float(x.norm()), 1e-37))
        if momentum:
            u = vectors.get(f"{name}/momentum")
            x = x.clone() if u is None else x + momentum * u
            vectors[f"{name}/momentum"] = x
        return super().before(vectors, name, x, momentum, ranks)

    def after(self, vectors: Vectors, name: str, wanted: Tensor, sent: Tensor) -> None:
        super().after(vectors, name, wanted, sent)
        if (u := vectors.get(f"{name}/momentum")) is not None:
            u.masked_fill_(sent != 0, 0.0)


@dataclass(frozen=True)
class _LayerByLayer(DGC):
    """For vectors that consist of layers."""

    lengths: tuple[int, ...] = ()

    def size(self, n: int) -> int | None:
        if n != sum(self.lengths):
            return super().size(n)
        return self._size(n, sum(kept(self.ratio, length) for length in self.lengths))

    def choose(self, x: Array) -> Array:
        if x.size != sum(self.lengths):
            return super().choose(x)
        spans = pairwise([0, *accumulate(self.lengths)])
        return np.concatenate([begin + largest(x[begin:end], kept(self.ratio, end - begin)) for begin, end in spans])
