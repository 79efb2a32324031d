"""A model as one flat vector: its parameters are views of `x`, its gradients of `g`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hocket.core.errors import UserError
from hocket.core.modules import check_module
from hocket.core.weight import Weight


@dataclass
class Gradient:
    """A gradient, and the samples that it is the mean of: means over workers are weighted by them."""

    vector: Tensor
    weight: Weight

    @property
    def samples(self) -> float:
        return self.weight.samples


@dataclass(frozen=True)
class Part:
    """A stretch of the flat gradient that is complete at one moment of the way back."""

    number: int
    """In the order in which parts are complete."""
    span: slice
    done: float
    """Share of the gradient that is complete with it."""


class Replica:
    """A model whose trainable parameters and floating-point buffers lie in one block.

    The block is [parameters | buffers | one spare element]. `x` is the parameters, `values` the parameters and buffers
    (BatchNorm statistics belong to a replica but have no gradient). Spare elements, here and behind the gradient, are
    for weights that are not known beforehand and travel with what they weigh.
    """

    def __init__(self, model: nn.Module, device: torch.device | None = None) -> None:
        check_module(model)
        self.model = model.to(device) if device is not None else model
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise UserError("the model has no trainable parameters")
        dtypes = {p.dtype for _, p in named}
        places = {p.device for _, p in named}
        if len(dtypes) > 1 or len(places) > 1:
            raise UserError(
                f"all trainable parameters must share one dtype and device; got "
                f"{', '.join(sorted(str(s) for s in dtypes | places))}"
            )
        dtype, place = named[0][1].dtype, named[0][1].device
        if dtype not in (torch.float32, torch.float64):
            raise UserError(
                f"parameters must be float32 or float64, got {dtype}; use torch.autocast for half precision"
            )
        buffers = [b for b in model.buffers() if b.dtype == dtype]
        self.odd_buffers = [b for b in model.buffers() if b.is_floating_point() and b.dtype != dtype]
        """Statistics in another precision: averaged one by one."""
        self.names = [n for n, _ in named]
        self.parameters = [p for _, p in named]
        self._rest: list[Tensor] = [p for p in model.parameters() if not p.requires_grad]
        self._rest += [b for b in model.buffers() if b.dtype != dtype]

        n = sum(p.numel() for p in self.parameters)
        m = sum(b.numel() for b in buffers)
        block = torch.zeros(n + m + 1, dtype=dtype, device=place)
        self.values, self.x, self.buffers, self.count = block[:-1], block[:n], block[n:-1], block[-1:]
        gradient = torch.zeros(n + 1, dtype=dtype, device=place)
        self.g, self.gradient_count = gradient[:-1], gradient[-1:]
        self.grads = list(self._views(self.g))
        self.parts = self._parts()
        for p, view, grad in zip(self.parameters, self._views(self.x), self.grads, strict=True):
            view.copy_(p.data)
            p.data = view
            p.grad = grad
        at = n
        for b in buffers:
            view = self.values[at : at + b.numel()].view(b.shape)
            view.copy_(b.data)
            b.data = view
            at += b.numel()

    def _views(self, flat: Tensor) -> Iterator[Tensor]:
        at = 0
        for p in self.parameters:
            yield flat[at : at + p.numel()].view(p.shape)
            at += p.numel()

    def _parts(self) -> list[Part]:
        """A parameter is a part; the last one is complete first."""
        parts: list[Part] = []
        end = n = self.x.numel()
        for number, p in enumerate(reversed(self.parameters)):
            begin = end - p.numel()
            parts.append(Part(number, slice(begin, end), (n - begin) / n))
            end = begin
        return parts

    def layout(self, flat: Tensor) -> dict[str, Tensor]:
        """Named views of a flat vector, shaped like the parameters."""
        return dict(zip(self.names, self._views(flat), strict=True))

    def collect(self) -> None:
        """Make `g` hold the gradients, also after something replaced or dropped a parameter's `.grad`."""
        for p, grad in zip(self.parameters, self.grads, strict=True):
            if p.grad is grad:
                continue
            if p.grad is None:
                grad.zero_()
            elif p.grad.layout != torch.strided:
                raise UserError("sparse gradients are not supported; build the layer with sparse=False")
            else:
                grad.copy_(p.grad)
            p.grad = grad

    def rest(self) -> list[Tensor]:
        """Tensors outside the block: frozen parameters, and buffers of another type."""
        return [t.data for t in self._rest]
