"""Layers that slide over an image, and what they see of it."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import nn

from hocket.layouts.halo import Box


class Window(NamedTuple):
    """What a layer sees of an image for one output: pairs are of rows and columns."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    before: tuple[int, int]
    """Padding above, and to the left."""
    after: tuple[int, int]
    fill: float

    def outputs(self, size: int, axis: int) -> int:
        """How many there are along an axis of so many inputs."""
        padded = size + self.before[axis] + self.after[axis]
        return (padded - self.dilation[axis] * (self.kernel[axis] - 1) - 1) // self.stride[axis] + 1

    def needs(self, outputs: Box) -> Box:
        """The inputs that a box of outputs follows from."""

        def reach(first: int, end: int, axis: int) -> tuple[int, int]:
            begin = first * self.stride[axis] - self.before[axis]
            last = (end - 1) * self.stride[axis] - self.before[axis]
            return begin, last + self.dilation[axis] * (self.kernel[axis] - 1) + 1

        return Box(*reach(outputs.top, outputs.bottom, 0), *reach(outputs.left, outputs.right, 1))

    def seeing(self, inputs: Box, outputs: Box) -> Box:
        """Of a box of outputs, those that may follow from some of these inputs."""

        def reach(first: int, end: int, axis: int) -> tuple[int, int]:
            below = first + self.before[axis] - self.dilation[axis] * (self.kernel[axis] - 1)
            return -(-below // self.stride[axis]), (end - 1 + self.before[axis]) // self.stride[axis] + 1

        return outputs.meet(Box(*reach(inputs.top, inputs.bottom, 0), *reach(inputs.left, inputs.right, 1)))


def window(layer: nn.Module) -> Window | None:
    """Of a layer that can work on tiles; None of any other."""
    match layer:
        case nn.Conv2d() if type(layer) is nn.Conv2d and layer.padding_mode == "zeros":
            left, right, top, bottom = layer._reversed_padding_repeated_twice
            sides = (_pair(layer.kernel_size), _pair(layer.stride), _pair(layer.dilation))
            return Window(*sides, (top, left), (bottom, right), 0.0)
        case nn.MaxPool2d() if type(layer) is nn.MaxPool2d and not layer.ceil_mode and not layer.return_indices:
            padding = _pair(layer.padding)
            sides = (_pair(layer.kernel_size), _pair(layer.stride), _pair(layer.dilation))
            return Window(*sides, padding, padding, -math.inf)
        case nn.AvgPool2d() if type(layer) is nn.AvgPool2d and not layer.ceil_mode and layer.divisor_override is None:
            padding = _pair(layer.padding)
            if layer.count_include_pad or padding == (0, 0):
                return Window(_pair(layer.kernel_size), _pair(layer.stride), (1, 1), padding, padding, 0.0)
    return None


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
