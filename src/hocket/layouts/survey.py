"""What a layout would do to a model, found out without any other rank: who gets what, and what travels in a step."""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hocket.core.comm import Comm
from hocket.engines.local import LocalComm
from hocket.engines.threads import ThreadWorld
from hocket.layouts.mesh import Layout
from hocket.layouts.split import Split
from hocket.layouts.tensor import split


@dataclass(frozen=True)
class Layer:
    """One layer of a model under a layout."""

    name: str
    kind: str
    how: str
    parameters: int
    """Of the whole layer."""
    own: int
    """On the rank that has most of them."""
    sent: int
    """Bytes that the ranks of one model send each other for it in a step."""


def survey(model: nn.Module, layout: Layout, inputs: Any) -> list[Layer]:
    """All layers that have parameters or send something, in the order of the model. Refuses what cannot be split."""
    calls = _calls(model, inputs)
    part = split(copy.deepcopy(model), unconnected(layout.tensor))
    shared = {m.path: m for m in part.modules() if isinstance(m, Split)}
    found = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{path}.") for path in shared):
            continue
        own = shared.get(name)
        parameters = list(module.parameters(recurse=own is not None))
        whole = sum(p.numel() for p in parameters)
        if not whole:
            continue
        sent = sum(own.traffic(args, output) * output.element_size() for args, output in calls[name]) if own else 0
        mine = sum(p.numel() for p in own.parameters()) if own else whole
        found.append(Layer(name, type(module).__name__, own.how if own else "replicated", whole, mine, sent))
    return found


def _calls(model: nn.Module, inputs: Any) -> dict[str, list[tuple[tuple[Tensor, ...], Tensor]]]:
    """What each layer gets and gives in a step."""
    watched = copy.deepcopy(model).train()
    calls: dict[str, list[tuple[tuple[Tensor, ...], Tensor]]] = defaultdict(list)
    for name, module in watched.named_modules():

        def note(_: nn.Module, args: tuple[Any, ...], output: Any, name: str = name) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor):
                calls[name].append((tuple(a for a in args if isinstance(a, Tensor)), first))

        module.register_forward_hook(note)
    with torch.random.fork_rng(devices=[]):
        watched(inputs)
    return calls


def unconnected(size: int) -> Comm:
    """A communicator of so many ranks, in which nobody says anything: for what only asks how many there are."""
    return LocalComm(ThreadWorld(size, 1.0), 0, range(size), 0)
