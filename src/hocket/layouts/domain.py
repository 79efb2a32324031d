"""Domain parallelism: each image is shared out over a grid of ranks, and only the rims of the tiles travel.

Gholami et al. 2018. Every rank has all weights; a convolution or pooling gets what its outputs need of the
neighbours' tiles. At the first layer that is none of these the image is gathered, and all go on with the whole of it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hocket.core.comm import Comm
from hocket.core.errors import UserError
from hocket.layouts.convolution import Place, convolve
from hocket.layouts.exchange import enter, total
from hocket.layouts.halo import Box, Tiling, Trade, assemble, fetch, fetch_bytes
from hocket.layouts.mesh import Layout
from hocket.layouts.pipeline import Named, flat, in_turn
from hocket.layouts.tensor import ELEMENTWISE
from hocket.layouts.window import Window, window


def works_on_tiles(layer: nn.Module) -> bool:
    hooks = (layer._forward_pre_hooks, layer._forward_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    known = window(layer) is not None or type(layer) in (nn.BatchNorm2d, *ELEMENTWISE)
    return known and not any(hooks)


class Tiled(nn.Module):
    """The first layers of a model, on one tile of each image; what they give is whole again."""

    def __init__(self, layers: list[Named], comm: Comm, layout: Layout) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer.module for layer in layers)
        self.paths = [layer.path for layer in layers]
        self.comm, self.layout = comm, layout

    def forward(self, images: Tensor) -> Tensor:
        tiling = first_tiling(images, self.layout)
        x = tiling.tile(self.comm.rank).of(images, tiling.all)
        for path, layer in zip(self.paths, self.layers, strict=True):
            if (seen := window(layer)) is not None:
                after = next_tiling(tiling, seen, f"{path} ({type(layer).__name__})")
                trade = Trade(self.comm, tiling.tiles, [seen.needs(tile) for tile in after.tiles])
                x, tiling = self._seen(layer, seen, trade, after.tile(self.comm.rank), x), after
            elif isinstance(layer, nn.BatchNorm2d):
                x = self._normalised(layer, x, len(images) * tiling.height * tiling.width)
            else:
                x = layer(x)
        return assemble(self.comm, x, tiling)

    def _whole(self, parameter: Tensor | None) -> Tensor | None:
        """A parameter that all ranks have: each finds the gradient on its tile, and they add them up."""
        return None if parameter is None else enter(self.comm, parameter)

    def _seen(self, layer: nn.Module, seen: Window, trade: Trade, outputs: Box, x: Tensor) -> Tensor:
        """What a layer with a window makes of it. What pooling slides over has its padding already."""
        match layer:
            case nn.Conv2d():
                return convolve(
                    Place(layer, seen, trade, outputs), x, enter(self.comm, layer.weight), self._whole(layer.bias)
                )
            case nn.MaxPool2d():
                return F.max_pool2d(fetch(trade, x, seen.fill), layer.kernel_size, layer.stride, 0, layer.dilation)
            case nn.AvgPool2d():
                return F.avg_pool2d(fetch(trade, x, seen.fill), layer.kernel_size, layer.stride, 0)
        raise AssertionError(f"a {type(layer).__name__} has no window")

    def _normalised(self, layer: nn.BatchNorm2d, x: Tensor, count: int) -> Tensor:
        """With the moments of the whole images."""
        weight, bias = self._whole(layer.weight), self._whole(layer.bias)
        if not layer.training and layer.running_mean is not None:
            return F.batch_norm(x, layer.running_mean, layer.running_var, weight, bias, False, 0.0, layer.eps)
        mean = total(self.comm, x.sum((0, 2, 3))) / count
        apart = x - mean[:, None, None]
        variance = total(self.comm, apart.square().sum((0, 2, 3))) / count
        if layer.training and layer.running_mean is not None:
            self._remember(layer, mean.detach(), variance.detach() * (count / (count - 1)))
        y = apart * torch.rsqrt(variance + layer.eps)[:, None, None]
        if weight is not None:
            y = y * weight[:, None, None]
        return y if bias is None else y + bias[:, None, None]

    def _remember(self, layer: nn.BatchNorm2d, mean: Tensor, variance: Tensor) -> None:
        assert layer.running_mean is not None and layer.running_var is not None
        assert layer.num_batches_tracked is not None
        layer.num_batches_tracked.add_(1)
        share = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
        layer.running_mean.mul_(1 - share).add_(mean, alpha=share)
        layer.running_var.mul_(1 - share).add_(variance, alpha=share)

    def traffic(self, images: Tensor) -> dict[str, int]:
        """Bytes that all ranks together send for each layer in a step; what gathers the images counts to the last."""
        tiling, others, sent = first_tiling(images, self.layout), self.comm.size - 1, {}
        layers = [Named(path, layer) for path, layer in zip(self.paths, self.layers, strict=True)]
        calls = list(in_turn(layers, images))
        for (path, layer), (x, _) in zip(layers, calls, strict=True):
            sent[path] = 2 * others * sum(p.numel() * p.element_size() for p in layer.parameters() if p.requires_grad)
            if (seen := window(layer)) is not None:
                after = next_tiling(tiling, seen, path)
                one_way = fetch_bytes(x, tiling.tiles, [seen.needs(tile) for tile in after.tiles])
                sent[path] += (1 + x.requires_grad) * one_way
                tiling = after
            elif isinstance(layer, nn.BatchNorm2d):  # two moments
                sent[path] += (1 + x.requires_grad) * 2 * 2 * others * layer.num_features * x.element_size()
        sent[self.paths[-1]] += fetch_bytes(calls[-1][1], tiling.tiles, [tiling.all] * self.comm.size)
        return sent


def first_tiling(images: Tensor, layout: Layout) -> Tiling:
    height, width = images.shape[-2:]
    return _checked(Tiling(height, width, layout.rows, layout.columns), "the data")


def next_tiling(before: Tiling, seen: Window, what: str) -> Tiling:
    """How the outputs of a layer are shared out."""
    size = seen.outputs(before.height, 0), seen.outputs(before.width, 1)
    return _checked(Tiling(*size, before.rows, before.columns), what)


def _checked(tiling: Tiling, what: str) -> Tiling:
    if tiling.height < tiling.rows or tiling.width < tiling.columns:
        grid = f"{tiling.rows}x{tiling.columns}"
        raise UserError(
            f"domain={grid}: {what} gives images of {tiling.height}x{tiling.width}, too small for {grid} ranks; "
            f"use fewer"
        )
    return tiling


def tiled(model: nn.Module, comm: Comm, layout: Layout) -> nn.Sequential:
    """The model with its first layers on tiles."""
    ranks = layout.rows * layout.columns
    if type(model) is not nn.Sequential:
        raise UserError(
            f"domain={layout.domain}: a {type(model).__name__} does not say which layers see an image; "
            f"write the model as an nn.Sequential, or use tensor={ranks}"
        )
    layers = list(flat(model, ""))
    count = next((i for i, layer in enumerate(layers) if not works_on_tiles(layer.module)), len(layers))
    if not any(isinstance(layer.module, nn.Conv2d) for layer in layers[:count]):
        first = f"{layers[count].path} ({type(layers[count].module).__name__})" if count < len(layers) else "the model"
        raise UserError(
            f"domain={layout.domain}: {first} cannot work on parts of an image, and no convolution comes before it; "
            f"use tensor={ranks}"
        )
    return nn.Sequential(Tiled(layers[:count], comm, layout), *(layer.module for layer in layers[count:]))
