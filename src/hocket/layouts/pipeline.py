"""Pipeline parallelism: successive layers of a model on successive ranks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from hocket.core.errors import UserError
from hocket.core.seeds import generators_as_they_were
from hocket.layouts.exchange import given
from hocket.layouts.mesh import Layout

Agree = Callable[[list[float]], list[float]]
ROUNDS = 3
"""Times that each layer is tried; the fastest counts."""


class Named(NamedTuple):
    """A layer, and where it stands in the model."""

    path: str
    module: nn.Module


def layers_of(model: nn.Module, stages: int) -> list[Named]:
    """The layers that follow each other, each the only input of the next: those of an nn.Sequential."""
    if type(model) is not nn.Sequential:
        raise UserError(
            f"pipeline={stages}: a {type(model).__name__} does not say in which order its layers follow each other; "
            f"write the model as an nn.Sequential, or use tensor={stages}"
        )
    layers = list(flat(model, ""))
    trained = [layer.path for layer in layers if is_trained(layer.module)]
    if len(trained) < stages:
        raise UserError(f"pipeline={stages}: the model has {len(trained)} layers with parameters; use fewer stages")
    return layers


def flat(model: nn.Sequential, path: str) -> Iterator[Named]:
    for name, child in model._modules.items():
        assert child is not None
        here = f"{path}.{name}" if path else name
        if type(child) is nn.Sequential and len(child):
            yield from flat(child, here)
        else:
            yield Named(here, child)


def in_turn(layers: Sequence[Named], x: Any) -> Iterator[tuple[Any, Any]]:
    """What each layer gets and gives. One that stands in several places may give other things in each."""
    for layer in layers:
        y = layer.module(x)
        yield x, y
        x = y


def least_samples(model: nn.Module) -> int:
    """That a micro-batch must have: of a single sample nn.BatchNorm1d refuses to take the spread."""
    return 2 if any(isinstance(module, nn.BatchNorm1d) for module in model.modules()) else 1


def is_trained(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def by_hand(layers: Sequence[Named], text: str, stages: int) -> list[int]:
    """Where each stage ends, from `3+2+2`."""
    words = text.split("+")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UserError(f"layout: stages must be numbers of layers like 3+2+2; got {text!r}")
    ends = list(accumulate(map(int, words)))
    if len(ends) != stages or ends[-1] != len(layers):
        raise UserError(
            f"layout: stages={text} is {len(ends)} stages of {ends[-1]} layers; "
            f"pipeline={stages} needs {stages} of {len(layers)}"
        )
    return ends


def in_words(ends: Sequence[int]) -> str:
    """What `by_hand` would read these ends from."""
    return "+".join(str(end - begin) for begin, end in pairwise([0, *ends]))


def may_end(layers: Sequence[Named]) -> list[bool]:
    """Whether a stage may end behind each layer: not between two that share a parameter."""
    places: dict[nn.Parameter, list[int]] = {}
    for at, layer in enumerate(layers):
        for p in layer.module.parameters():
            places.setdefault(p, []).append(at)
    return [all(at >= used[-1] or at < used[0] for used in places.values()) for at in range(len(layers))]


def balanced(costs: Sequence[float], trained: Sequence[bool], ends: Sequence[bool], stages: int) -> list[int]:
    """Where each stage ends, so that the most expensive one costs as little as it can; each has something to train,
    and ends where it may. Empty where that cannot be."""
    total, count = [0.0, *accumulate(costs)], [0, *accumulate(map(int, trained))]
    n = len(costs)
    nowhere: tuple[float, list[int]] = (float("inf"), [])
    best = [[(0.0, list[int]())] + [nowhere] * n]
    for _ in range(stages):
        before, row = best[-1], [nowhere] * (n + 1)
        for end in range(1, n + 1):
            for begin in range(end):
                most = max(before[begin][0], total[end] - total[begin])
                if ends[end - 1] and count[end] > count[begin] and most < row[end][0]:
                    row[end] = most, [*before[begin][1], end]
        best.append(row)
    return best[stages][n][1]


def ends_of(layers: Sequence[Named], layout: Layout, inputs: Any, *, timed: bool, agree: Agree = list) -> list[int]:
    """Where each stage ends: as the layout says, or by cost. `agree` makes all ranks' costs the same; who has no inputs
    to measure with hears of them there."""
    if layout.stages:
        return by_hand(layers, layout.stages, layout.pipeline)
    costs = [0.0] * len(layers) if inputs is None else costs_of(layers, inputs, timed=timed)
    return by_cost(layers, agree(costs), layout.pipeline)


def by_cost(layers: Sequence[Named], costs: Sequence[float], stages: int) -> list[int]:
    """Where each stage ends, from what the layers cost."""
    ends = balanced(costs, [is_trained(layer.module) for layer in layers], may_end(layers), stages)
    if not ends:
        raise UserError(
            f"pipeline={stages}: layers that share a parameter must be in one stage, which leaves fewer than {stages}; "
            f"use tensor={stages}"
        )
    return ends


def check_stages(model: nn.Module, layout: Layout, inputs: Any) -> None:
    """Refuse layers that cannot be shared out as the layout says, or that cannot send each other what they give."""
    layers = layers_of(model, layout.pipeline)
    ends = by_hand(layers, layout.stages, layout.pipeline) if layout.stages else []
    ends = ends or by_cost(layers, [1.0] * len(layers), layout.pipeline)
    for number in range(layout.pipeline):
        stage(layers, ends, number)
    for layer, (_, y) in zip(layers[:-1], in_turn(layers, inputs), strict=False):
        if not isinstance(y, Tensor):
            raise UserError(
                f"pipeline={layout.pipeline}: {layer.path} ({type(layer.module).__name__}) gives a {type(y).__name__}, "
                f"and stages send each other one tensor; make it one module with the next layer, or use "
                f"tensor={layout.pipeline}"
            )


class Operations(TorchDispatchMode):
    """Counts those of this thread. PyTorch's FlopCounterMode sets hooks for all modules of a process, where other ranks
    may be threads."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        if func.overloadpacket in flop_registry:
            self.count += flop_registry[func.overloadpacket](*args, **kwargs or {}, out_val=result)
        return result


def costs_of(layers: Sequence[Named], inputs: Any, *, timed: bool) -> list[float]:
    """What each layer costs, there and back: in seconds or, where seconds mean nothing, in operations."""
    found = []
    x, wanted = inputs, False
    with generators_as_they_were():
        for layer in layers:
            tensors = _stand_ins(layer.module)
            x = x.detach().requires_grad_(wanted and x.is_floating_point())
            wanted |= is_trained(layer.module)
            if timed:
                found.append(min(_seconds(layer.module, tensors, x) for _ in range(ROUNDS)))
            else:
                found.append(_operations(layer.module, tensors, x))
            with torch.no_grad():
                x = functional_call(layer.module, tensors, (x,))
    return found


def _stand_ins(module: nn.Module) -> dict[str, Tensor]:
    """Tensors in place of a module's own, which may have no memory yet, and which nobody has trained."""

    def stand_in(tensor: Tensor) -> Tensor:
        made = torch.full_like(tensor, 0.01, device="cpu") if tensor.is_meta else tensor.detach().clone()
        return made.requires_grad_(tensor.requires_grad)

    return {name: stand_in(t) for name, t in chain(module.named_parameters(), module.named_buffers())}


def _seconds(module: nn.Module, tensors: dict[str, Tensor], x: Tensor) -> float:
    began = time.perf_counter()
    _there_and_back(module, tensors, x)
    return time.perf_counter() - began


def _operations(module: nn.Module, tensors: dict[str, Tensor], x: Tensor) -> float:
    """Multiplications and additions; elements that are only moved count too, or an activation would cost nothing."""
    with Operations() as counter:
        outputs = _there_and_back(module, tensors, x)
    return float(counter.count + x.numel() + sum(y.numel() for y in outputs))


def _there_and_back(module: nn.Module, tensors: dict[str, Tensor], x: Tensor) -> list[Tensor]:
    outputs = [y for y in tree_leaves(functional_call(module, tensors, (given(x),))) if isinstance(y, Tensor)]
    trained = [y for y in outputs if y.requires_grad]
    if trained:
        torch.autograd.backward(trained, [torch.ones_like(y) for y in trained])
    return outputs


def stage(layers: Sequence[Named], ends: Sequence[int], number: int) -> nn.Sequential:
    """The layers of one stage."""
    begin, end = [*pairwise([0, *ends])][number]
    owners = Counter(p for layer in layers for p in set(layer.module.parameters()))
    for layer in layers[begin:end]:
        for p in layer.module.parameters():
            if owners[p] > sum(p in set(other.module.parameters()) for other in layers[begin:end]):
                raise UserError(
                    f"pipeline={len(ends)}: {layer.path} and a layer of another stage share a parameter; put them into "
                    f"one stage with stages=..., or use tensor={len(ends)}"
                )
    chosen = nn.Sequential(*(layer.module for layer in layers[begin:end]))
    if not is_trained(chosen):
        raise UserError(f"layout: stage {number + 1} has no parameters to train; give it another layer")
    return chosen
