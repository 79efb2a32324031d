"""A convolution on tiles of an image: each rank computes on its own tile while it waits for its neighbours' rims.

An output is a sum over inputs, so what some of them add to it can be found without the others, with zeros in their
place. Nobody has to put a tile and the rims around it into one tensor, which takes as long as a good part of the
convolution.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hocket.layouts.halo import Box, Trade
from hocket.layouts.window import Window


class Place(NamedTuple):
    """A convolution, and where in the image its inputs and outputs are."""

    layer: nn.Conv2d
    seen: Window
    trade: Trade
    outputs: Box
    """This rank's."""

    def terms(self, part: Tensor, box: Box, outputs: Box, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """What the inputs in a box add to some outputs."""
        layer, need = self.layer, self.seen.needs(outputs)
        top, bottom, left, right = box.within(need)
        padding = (0, 0)
        if min(top, left) >= 0 and self._same(0, box, top, bottom) and self._same(1, box, left, right):
            padding = (top, left)  # without a copy
        else:
            part = F.pad(part, (left, right, top, bottom))
        return F.conv2d(part, weight, bias, layer.stride, padding, layer.dilation, layer.groups)

    def _same(self, axis: int, box: Box, before: int, after: int) -> bool:
        """Whether as much padding behind a part as before it, which PyTorch can do itself, gives as many outputs."""
        size = (box.bottom - box.top, box.right - box.left)[axis]
        bare = self.seen._replace(before=(0, 0), after=(0, 0))
        return bare.outputs(size + 2 * before, axis) == bare.outputs(size + before + after, axis)


class _Convolution(torch.autograd.Function):
    """Each part of the inputs has a graph of its own, which backward goes through when it is the part's turn."""

    @staticmethod
    def forward(ctx: Any, place: Place, x: Tensor, weight: Tensor, bias: Tensor | None, learning: bool) -> Tensor:
        trade, outputs = place.trade, place.outputs
        requests = trade.start({r: box.of(x, trade.tile) for r, box in trade.given.items()})
        _, of_x, of_weight, of_bias, _ = (learning and needed for needed in ctx.needs_input_grad)
        x, weight = x.detach().requires_grad_(of_x), weight.detach().requires_grad_(of_weight)
        bias = None if bias is None else bias.detach().requires_grad_(of_bias)
        ctx.trade, ctx.outputs, ctx.leaves, ctx.rims = trade, outputs, (x, weight, bias), []
        with torch.set_grad_enabled(learning):
            own = x if trade.own == trade.tile else trade.own.of(x, trade.tile)
            ctx.inner = place.terms(own, trade.own, outputs, weight, bias)
            y: Tensor = ctx.inner.detach()
            for r, values in trade.finish(requests, trade.taken).items():
                part, rim = values.requires_grad_(of_x), place.seen.seeing(trade.taken[r], outputs)
                terms = place.terms(part, trade.taken[r], rim, weight)
                rim.of(y, outputs).add_(terms.detach())
                ctx.rims.append((r, part, rim, terms))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor | None, Tensor | None, Tensor | None, None]:
        trade, (x, weight, bias), inner, rims = ctx.trade, ctx.leaves, ctx.inner, ctx.rims
        ctx.leaves = ctx.inner = ctx.rims = None  # or the gradients below would last as long as the model's graph
        for _, _, rim, terms in rims:
            if terms.requires_grad:
                torch.autograd.backward(terms, rim.of(g, ctx.outputs))
        requests = trade.start({r: part.grad for r, part, *_ in rims}) if x.requires_grad else []
        torch.autograd.backward(inner, g)
        if x.requires_grad:
            for r, part in trade.finish(requests, trade.given).items():
                trade.given[r].of(x.grad, trade.tile).add_(part)
        return None, x.grad, weight.grad, None if bias is None else bias.grad, None


def convolve(place: Place, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """This rank's outputs of a convolution, from its tile of the inputs."""
    y: Tensor = _Convolution.apply(place, x, weight, bias, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return y
