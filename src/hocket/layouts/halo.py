"""Rectangles of an image on a grid of ranks: who has which, who needs which, and how they travel there and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hocket.core.comm import Comm, Request
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

    def within(self, other: Box) -> tuple[int, int, int, int]:
        """How far its sides are inside those of another: top, bottom, left and right."""
        return self.top - other.top, other.bottom - self.bottom, self.left - other.left, other.right - self.right

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


@dataclass(frozen=True)
class Trade:
    """What the ranks have, each its tile, and what each needs."""

    comm: Comm
    tiles: list[Box]
    needs: list[Box]

    @property
    def tile(self) -> Box:
        return self.tiles[self.comm.rank]

    @property
    def need(self) -> Box:
        return self.needs[self.comm.rank]

    @property
    def own(self) -> Box:
        """What this rank needs and has."""
        return self.tile.meet(self.need)

    @property
    def taken(self) -> dict[int, Box]:
        """What this rank needs of each other one's tile."""
        return self._others([tile.meet(self.need) for tile in self.tiles])

    @property
    def given(self) -> dict[int, Box]:
        """What each other rank needs of this one's tile."""
        return self._others([self.tile.meet(need) for need in self.needs])

    def _others(self, met: list[Box]) -> dict[int, Box]:
        return {r: box for r, box in enumerate(met) if r != self.comm.rank and box.area}

    def start(self, parts: Mapping[int, Tensor]) -> list[Request]:
        """Send each rank its part."""
        return [self.comm.isend(r, Message("halo", (), (part.contiguous(),)), _TAG) for r, part in parts.items()]

    def finish(self, requests: list[Request], sources: Iterable[int]) -> dict[int, Tensor]:
        """What others sent; and wait until they have what this rank did."""
        found = {r: self.comm.recv(r, _TAG)[1].tensors[0] for r in sources}
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
    def forward(ctx: Any, trade: Trade, x: Tensor, fill: float) -> Tensor:
        ctx.trade = trade
        requests = trade.start({r: box.of(x, trade.tile) for r, box in trade.given.items()})
        need, own = trade.need, trade.own
        out = x.new_empty((*x.shape[:-2], need.bottom - need.top, need.right - need.left))
        _fill_outside(out, need, need.meet(trade.tiles[0].around(trade.tiles[-1])), fill)
        own.of(out, need).copy_(own.of(x, trade.tile))
        for r, part in trade.finish(requests, trade.taken).items():
            trade.taken[r].of(out, need).copy_(part)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor, None]:
        trade: Trade = ctx.trade
        requests = trade.start({r: box.of(g, trade.need) for r, box in trade.taken.items()})
        tile, own = trade.tile, trade.own
        out = g.new_empty((*g.shape[:-2], tile.bottom - tile.top, tile.right - tile.left))
        _fill_outside(out, tile, own, 0.0)
        own.of(out, tile).copy_(own.of(g, trade.need))
        for r, part in trade.finish(requests, trade.given).items():
            trade.given[r].of(out, tile).add_(part)
        return None, out, None


class _Assemble(torch.autograd.Function):
    """From tiles to the image, which all ranks use alike: each takes its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, comm: Comm, x: Tensor, tiling: Tiling) -> Tensor:
        ctx.tile, ctx.all = tiling.tile(comm.rank), tiling.all
        out: Tensor = _Fetch.forward(ctx, Trade(comm, tiling.tiles, [tiling.all] * comm.size), x, 0.0)
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


def fetch(trade: Trade, x: Tensor, fill: float) -> Tensor:
    """What this rank needs, from those who have it; beyond the image it is `fill`."""
    if trade.needs == trade.tiles:
        return x
    fetched: Tensor = _Fetch.apply(trade, x, fill)  # type: ignore[no-untyped-call]
    return fetched


def assemble(comm: Comm, x: Tensor, tiling: Tiling) -> Tensor:
    """The whole image, from everybody's tile."""
    image: Tensor = _Assemble.apply(comm, x, tiling)  # type: ignore[no-untyped-call]
    return image
