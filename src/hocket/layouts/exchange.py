"""Communication inside forward and backward: each of these does on the way back what its gradient asks for.

What every rank has alike is called whole; what each has a part of, shared out. All ranks of `comm` call them in the
same order, as they run the same model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hocket.core.comm import Comm


def shares(total: int, ranks: int) -> list[int]:
    """How many of `total` each rank gets: the first ones get one more where it does not come out even."""
    even, rest = divmod(total, ranks)
    return [even + (rank < rest) for rank in range(ranks)]


def span(sizes: Sequence[int], rank: int) -> slice:
    """Where a rank's share lies in the whole."""
    begin = sum(sizes[:rank])
    return slice(begin, begin + sizes[rank])


def gather(comm: Comm, part: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """All ranks' parts side by side, without a gradient. Shares of different sizes are told one after the other:
    so no padding travels."""
    part = part.detach().contiguous()
    if len(set(sizes)) == 1:
        out = part.new_empty(comm.size * part.numel())
        comm.all_gather(out, part.view(-1))
        return torch.cat(out.view(comm.size, *part.shape).unbind(), dim)
    parts = []
    for rank, size in enumerate(sizes):
        shape = list(part.shape)
        shape[dim] = size
        told = part.clone() if rank == comm.rank else part.new_empty(shape)
        if told.numel():
            comm.broadcast(told, rank)
        parts.append(told)
    return torch.cat(parts, dim)


def add_up(comm: Comm, part: Tensor) -> Tensor:
    """The sum of all ranks' tensors, without a gradient."""
    total = part.detach().clone(memory_format=torch.contiguous_format)
    comm.all_reduce(total.view(-1))
    return total


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: Comm, x: Tensor) -> Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        return None, add_up(ctx.comm, g)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: Comm, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.dim, ctx.own = dim, span(sizes, comm.rank)
        return gather(comm, x, dim, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor, None, None]:
        return None, g.narrow(ctx.dim, ctx.own.start, ctx.own.stop - ctx.own.start), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: Comm, x: Tensor) -> Tensor:
        return add_up(comm, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        return None, g


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


# A Function's apply has no types of its own.


def enter(comm: Comm, x: Tensor) -> Tensor:
    """Whole, used by each rank for its share of the outputs: the gradients are added up on the way back."""
    entered: Tensor = _Enter.apply(comm, x)  # type: ignore[no-untyped-call]
    return entered


def leave(comm: Comm, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Shared out along `dim` becomes whole; every rank takes its share of the gradient."""
    gathered: Tensor = _Gather.apply(comm, x, dim % x.dim(), sizes)  # type: ignore[no-untyped-call]
    return gathered


def reduced(comm: Comm, x: Tensor) -> Tensor:
    """Each rank's terms of a sum become the sum; its gradient is everyone's."""
    total: Tensor = _Reduce.apply(comm, x)  # type: ignore[no-untyped-call]
    return total


def total(comm: Comm, x: Tensor) -> Tensor:
    """The sum over all ranks, of which each uses the result in its own way: gradients are added up too."""
    return enter(comm, reduced(comm, x))


def given(x: Tensor) -> Tensor:
    """A leaf as a layer may have it that works in place, which autograd forbids with a leaf that wants a gradient."""
    same: Tensor = _Given.apply(x)  # type: ignore[no-untyped-call]
    return same
