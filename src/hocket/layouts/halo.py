"""Rectangles of an image on a grid of ranks: who has which, who needs which, and how they travel there and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hocket.core.comm import Comm
from hocket.core.message import Message
from hocket.layouts.exchange import shares, span

_TAG = 7006


class Box(NamedTuple):
    """Rows from `top` to before `bottom`, columns from `left` to before `right`. It may reach beyond the image."""

    top: int
    bottom: int
    left: int
    right: int

    def meet(self, other: Box) -> Box:
        top, left = max(self.top, other.top), max(self.left, other.left)
        return Box(top, max(min(self.bottom, other.bottom), top), left, max(min(self.right, other.right), left))

    def around(self, other: Box) -> Box:
        """The smallest that has both."""
        top, left = min(self.top, other.top), min(self.left, other.left)
        return Box(top, max(self.bottom, other.bottom), left, max(self.right, other.right))

    @property
    def area(self) -> int:
        return (self.bottom - self.top) * (self.right - self.left)

    def of(self, tensor: Tensor, box: Box) -> Tensor:
        """This part of a tensor that has what is in `box`."""
        rows = slice(self.top - box.top, self.bottom - box.top)
        return tensor[..., rows, self.left - box.left : self.right - box.left]


@dataclass(frozen=True)
class Tiling:
    """An image of a certain size, shared out evenly over `rows` x `columns` ranks."""

    height: int
    width: int
    rows: int
    columns: int

    def tile(self, rank: int) -> Box:
        row, column = divmod(rank, self.columns)
        down, across = span(shares(self.height, self.rows), row), span(shares(self.width, self.columns), column)
        return Box(down.start, down.stop, across.start, across.stop)

    @property
    def tiles(self) -> list[Box]:
        return [self.tile(rank) for rank in range(self.rows * self.columns)]

    @property
    def all(self) -> Box:
        return Box(0, self.height, 0, self.width)


def _exchange(comm: Comm, give: list[tuple[int, Tensor]], take: list[int]) -> dict[int, Tensor]:
    """Send each its part, and get what others have."""
    requests = [comm.isend(to, Message("halo", (), (part.contiguous(),)), _TAG) for to, part in give]
    found = {source: comm.recv(source, _TAG)[1].tensors[0] for source in take}
    for request in requests:
        request.wait()
    return found


def _fill_outside(tensor: Tensor, box: Box, inside: Box, value: float) -> None:
    """Of a tensor that has what is in `box`, all that is not `inside`: mostly a rim, and the rest need not be touched
    twice."""
    tensor[..., : inside.top - box.top, :] = value
    tensor[..., inside.bottom - box.top :, :] = value
    tensor[..., : inside.left - box.left] = value
    tensor[..., inside.right - box.left :] = value


class _Fetch(torch.autograd.Function):
    """From tiles to the boxes that ranks need; on the way back, gradients are added where the tiles are."""

    @staticmethod
    def forward(ctx: Any, comm: Comm, x: Tensor, tiles: list[Box], needs: list[Box], fill: float) -> Tensor:
        me, others = comm.rank, [r for r in range(comm.size) if r != comm.rank]
        ctx.comm, ctx.tiles, ctx.needs, ctx.others = comm, tiles, needs, others
        give = [(r, tiles[me].meet(needs[r]).of(x, tiles[me])) for r in others if tiles[me].meet(needs[r]).area]
        take = [r for r in others if tiles[r].meet(needs[me]).area]
        need = needs[me]
        out = x.new_empty((*x.shape[:-2], need.bottom - need.top, need.right - need.left))
        _fill_outside(out, need, need.meet(tiles[0].around(tiles[-1])), fill)
        mine = tiles[me].meet(need)
        mine.of(out, need).copy_(mine.of(x, tiles[me]))
        for r, part in _exchange(comm, give, take).items():
            tiles[r].meet(need).of(out, need).copy_(part)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor, None, None, None]:
        comm, tiles, needs, others = ctx.comm, ctx.tiles, ctx.needs, ctx.others
        me = comm.rank
        tile, need = tiles[me], needs[me]
        give = [(r, tiles[r].meet(need).of(g, need)) for r in others if tiles[r].meet(need).area]
        take = [r for r in others if tile.meet(needs[r]).area]
        out = g.new_empty((*g.shape[:-2], tile.bottom - tile.top, tile.right - tile.left))
        mine = tile.meet(need)
        _fill_outside(out, tile, mine, 0.0)
        mine.of(out, tile).copy_(mine.of(g, need))
        for r, part in _exchange(comm, give, take).items():
            tile.meet(needs[r]).of(out, tile).add_(part)
        return None, out, None, None, None


class _Assemble(torch.autograd.Function):
    """From tiles to the image, which all ranks use alike: each takes its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, comm: Comm, x: Tensor, tiling: Tiling) -> Tensor:
        ctx.tile, ctx.all = tiling.tile(comm.rank), tiling.all
        everything = [tiling.all] * comm.size
        out: Tensor = _Fetch.forward(ctx, comm, x, tiling.tiles, everything, 0.0)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor, None]:
        return None, ctx.tile.of(g, ctx.all), None


def fetch_bytes(like: Tensor, tiles: list[Box], needs: list[Box]) -> int:
    """What all ranks together send for that, one way; `like` has the batch, channels and type."""
    sent = 0
    for source, tile in enumerate(tiles):
        for to, need in enumerate(needs):
            met = tile.meet(need)
            if source != to and met.area:
                shape = (*like.shape[:-2], met.bottom - met.top, met.right - met.left)
                sent += Message("halo", (), (torch.empty(shape, dtype=like.dtype, device="meta"),)).nbytes
    return sent


def fetch(comm: Comm, x: Tensor, tiles: list[Box], needs: list[Box], fill: float) -> Tensor:
    """What this rank needs, from those who have it; beyond the image it is `fill`."""
    fetched: Tensor = _Fetch.apply(comm, x, tiles, needs, fill)  # type: ignore[no-untyped-call]
    return fetched


def assemble(comm: Comm, x: Tensor, tiling: Tiling) -> Tensor:
    """The whole image, from everybody's tile."""
    image: Tensor = _Assemble.apply(comm, x, tiling)  # type: ignore[no-untyped-call]
    return image
