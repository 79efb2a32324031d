"""A model as one flat vector: its parameters are views of `x`, its gradients of `g`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hocket.core.errors import UserError
from hocket.core.memory_use import untouched_zeros
from hocket.core.modules import check_module
from hocket.core.weight import Weight

Shape = tuple[torch.Size, tuple[int, ...]]
"""Of a tensor, and its strides."""


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


Memory = Callable[[str, int, torch.dtype, torch.device], Tensor]
"""Gives a replica the memory that it lies in: zeros for its `block` or its `gradient`, of a length."""


def own_memory(purpose: str, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return untouched_zeros(length, dtype, device)


class Replica:
    """A model whose trainable parameters and floating-point buffers lie in one block.

    The block is [parameters | buffers | one spare element]. `x` is the parameters, `values` the parameters and buffers
    (BatchNorm statistics belong to a replica but have no gradient). Spare elements, here and behind the gradient, are
    for weights that are not known beforehand and travel with what they weigh.

    The block has the widest type among the parameters. Those of another type keep memory of their own, which `spread`
    and `collect` hold equal to their part of the block.
    """

    def __init__(self, model: nn.Module, device: torch.device | None = None, memory: Memory = own_memory) -> None:
        check_module(model)
        self.model = model.to(device) if device is not None else model
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        dtype, place = block_of([p for _, p in named])
        buffers = [b for b in model.buffers() if b.dtype == dtype]
        self.odd_buffers = [b for b in model.buffers() if b.is_floating_point() and b.dtype != dtype]
        """Statistics in another precision: averaged one by one."""
        self.names = [n for n, _ in named]
        self.parameters = [p for _, p in named]
        self._rest: list[Tensor] = [p for p in model.parameters() if not p.requires_grad]
        self._rest += [b for b in model.buffers() if b.dtype != dtype]

        n = sum(p.numel() for p in self.parameters)
        m = sum(b.numel() for b in buffers)
        self._shapes: list[Shape] = [(p.shape, strides_of(p)) for p in self.parameters]
        block = memory("block", n + m + 1, dtype, place)
        self.values, self.x, self.buffers, self.count = block[:-1], block[:n], block[n:-1], block[-1:]
        gradient = memory("gradient", n + 1, dtype, place)
        self.g, self.gradient_count = gradient[:-1], gradient[-1:]
        self.grads = list(self._views(self.g))
        self.places = list(self._views(self.x))
        """Where in `x` each parameter lies."""
        self.parts = self._parts()
        self._odd: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        for p, view, grad in zip(self.parameters, self.places, self.grads, strict=True):
            view.copy_(p.data)
            if p.dtype == dtype:
                p.data = view
                p.grad = grad
            else:
                self._odd.append((p, view, grad))
        at = n
        for b in buffers:
            view = self.values[at : at + b.numel()].view(b.shape)
            view.copy_(b.data)
            b.data = view
            at += b.numel()
        self._buffers = buffers

    def _views(self, flat: Tensor) -> Iterator[Tensor]:
        at = 0
        for shape, strides in self._shapes:
            yield flat[at : at + shape.numel()].as_strided(shape, strides)
            at += shape.numel()

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

    def fingerprint(self) -> str:
        """The same for models whose vectors mean the same: names, shapes, and order in memory."""
        return fingerprint_of(zip(self.names, self._shapes, strict=True))

    def collect(self) -> None:
        """Make `g` hold the gradients, also after something replaced or dropped a parameter's `.grad`."""
        for at in range(len(self.parameters)):
            self.collect_one(at)

    def collect_one(self, at: int) -> None:
        """The same for one parameter."""
        p, grad = self.parameters[at], self.grads[at]
        if p.grad is grad:
            return
        if p.grad is None:
            grad.zero_()
        elif p.grad.layout != torch.strided:
            raise UserError("sparse gradients are not supported; build the layer with sparse=False")
        else:
            grad.copy_(p.grad)
        if p.dtype == grad.dtype:
            p.grad = grad

    def collect_odd(self) -> None:
        """The same for parameters of another type alone, where nobody else touches gradients."""
        for p, _, grad in self._odd:
            if p.grad is not None:
                grad.copy_(p.grad)

    def zero_grad(self) -> None:
        self.g.zero_()
        for p, _, _ in self._odd:
            p.grad = None

    def unscale(self, scale: Tensor) -> None:
        """Divide the gradient by the scale that the loss was multiplied by."""
        self.g /= scale.to(self.g.device)
        for p, _, grad in self._odd:
            p.grad = grad.to(p.dtype)

    def spread(self) -> None:
        """Give parameters of another type what the block has."""
        for p, view, _ in self._odd:
            p.data.copy_(view)

    def stepping(self, optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> Callable[[], Any]:
        """A step of the optimizer along `g` that is seen in `x`, whatever type the parameters have."""
        its_own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not any(id(p) in its_own for p, _, _ in self._odd):
            return step  # it has the block itself

        def around() -> Any:
            for p, view, grad in self._odd:
                p.data.copy_(view)
                p.grad = grad.to(p.dtype)
            found = step()
            for p, view, _ in self._odd:
                view.copy_(p.data)
            return found

        return around

    @contextmanager
    def holding(self, values: Tensor) -> Iterator[None]:
        """Inside, the model has these values, of the parameters or of all."""
        own = self.values[: values.numel()]
        if values.data_ptr() == own.data_ptr():
            yield
            return
        saved = own.clone()
        own.copy_(values)
        self.spread()
        try:
            yield
        finally:
            own.copy_(saved)
            self.spread()

    def rest(self) -> list[Tensor]:
        """Tensors outside the block: frozen parameters, and buffers of another type."""
        return [t.data for t in self._rest]

    def release(self) -> None:
        """Give every tensor of the model memory of its own again."""
        for p in self.parameters:
            p.data, p.grad = p.data.clone(memory_format=torch.preserve_format), None
        for b in self._buffers:
            b.data = b.data.clone()


def fingerprint_of(named: Iterable[tuple[str, Shape]]) -> str:
    """Of the trainable parameters of a model."""
    text = repr([(name, tuple(shape), strides) for name, (shape, strides) in named])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def block_of(parameters: list[nn.Parameter]) -> tuple[torch.dtype, torch.device]:
    """The type and the device of the block that these lie in."""
    if not parameters:
        raise UserError("the model has no trainable parameters")
    places = sorted({str(p.device) for p in parameters})
    if len(places) > 1:
        raise UserError(f"all trainable parameters must be on one device; they are on {' and '.join(places)}")
    dtypes = {p.dtype for p in parameters}
    if odd := sorted(str(dtype) for dtype in dtypes if not dtype.is_floating_point or dtype.itemsize < 2):
        raise UserError(f"trainable parameters must be real numbers of 16, 32 or 64 bits; got {', '.join(odd)}")
    return torch.float64 if torch.float64 in dtypes else torch.float32, parameters[0].device


def strides_of(p: Tensor) -> tuple[int, ...]:
    """How it lies in memory, as in channels_last, if it fills a stretch of it; else as if it were new."""
    order = sorted(range(p.dim()), key=lambda i: (p.stride(i), p.shape[i]))
    expected = 1
    for i in order:
        if p.shape[i] > 1 and p.stride(i) != expected:
            return tuple(torch.empty(p.shape, device="meta").stride())
        expected *= p.shape[i]
    return tuple(p.stride())
