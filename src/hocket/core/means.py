"""Weighted means over ranks: what is averaged, and by how many samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from hocket.core.comm import Comm, Op
from hocket.core.weight import Weight


class Payload(NamedTuple):
    """What a mean is taken of."""

    lossy: tuple[Tensor, ...] = ()
    """May lose precision on the way."""
    exact: tuple[Tensor, ...] = ()
    """May not: statistics, counters."""
    residual: str = ""
    """Names the place where a compressor keeps what the lossy part lost."""
    is_model: bool = False
    """The lossy part is a model, and not a change: what lies between it and `since` is what may be encoded."""
    since: Tensor | None = None
    """A model that all ranks have alike; None is the last mean that they took."""


Reduce = Callable[[Tensor, Op], None]
"""Combines a tensor over the ranks, in place: their sum or mean."""

Mean = Callable[[Payload, Weight, Comm, Reduce, Tensor], float]
"""Takes a mean as `weighted_mean` does."""


def weighted_mean(payload: Payload, weight: Weight, comm: Comm, all_reduce: Reduce, count: Tensor) -> float:
    """Replace each rank's payload by sum w_i x_i / sum w_i; returns the sum of the weights.

    Where that sum is not known beforehand, the weight travels in `count`, one element that lies behind the payload or
    elsewhere. Where nobody has a sample, all weigh the same.
    """
    if comm.size == 1:
        return weight.samples
    if weight.of_all == 0:
        weight = Weight(1.0, comm.size)
    values = side_by_side([t for t in (*payload.lossy, *payload.exact) if t.numel()])
    if weight.of_all is not None:
        relative = weight.relative(comm.size)
        for part in values:
            if relative != 1:  # for a small model that is as much work as the sum
                part.mul_(relative)
            all_reduce(part, "mean")
        return weight.of_all
    for part in values:
        part.mul_(weight.samples)
    for part in side_by_side([*values, count.fill_(weight.samples)]):
        all_reduce(part, "sum")
    total = float(count)
    assert total > 0, "a weighted mean needs a sample"
    for part in values:
        part.div_(total)
    return total


def side_by_side(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same elements in fewer tensors: vectors that lie behind each other in one storage are joined."""
    if len(tensors) == 1:
        return list(tensors)
    joined: list[Tensor] = []
    for tensor in tensors:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.dtype == tensor.dtype
            and last.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            and last.storage_offset() + last.numel() == tensor.storage_offset()
        ):
            joined[-1] = last.as_strided((last.numel() + tensor.numel(),), (1,), last.storage_offset())
        else:
            joined.append(tensor)
    return joined
