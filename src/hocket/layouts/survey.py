"""What a layout would do to a model, found out without any other rank: who gets what, and what travels in a step."""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hocket.core.comm import Comm
from hocket.core.message import Message
from hocket.core.seeds import generators_as_they_were
from hocket.engines.local import LocalComm
from hocket.engines.threads import ThreadWorld
from hocket.layouts.domain import Tiled, tiled
from hocket.layouts.dropout import NoDrawing, check_dropout, drop_alike
from hocket.layouts.mesh import Layout
from hocket.layouts.microbatches import pieces
from hocket.layouts.pipeline import check_stages, ends_of, in_turn, layers_of, least_samples
from hocket.layouts.split import ByOutputs, InOnePiece, Split
from hocket.layouts.tensor import split

Calls = dict[str, list[tuple[tuple[Tensor, ...], Tensor]]]
"""What each layer gets and gives in a step, by its name; one that is used in several places goes by the first."""


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
    place: str
    """Which ranks have it: a stage of a pipeline; empty is all."""


def check(model: nn.Module, layout: Layout, inputs: Any) -> nn.Module:
    """Refuse what cannot be split, before anything starts; returns the first rank's share of every layer."""
    part, shared = copy.deepcopy(model), layout.ranks > layout.pipeline
    if shared:
        check_dropout(part)
    if layout.rows * layout.columns > 1:
        part = tiled(part, unconnected(layout.rows * layout.columns), layout)
        for module in part.modules():
            if isinstance(module, Tiled):
                module.traffic(inputs)  # sees whether the images are large enough
    if layout.tensor > 1:
        part = split(part, unconnected(layout.tensor))
    if shared:
        _check_call(model, [module for module in part.modules() if isinstance(module, Split)], inputs)
    if layout.pipeline > 1:
        layers_of(part, layout.pipeline)
        check_stages(copy.deepcopy(model), layout, inputs)
    return part


def _check_call(model: nn.Module, shares: list[Split], inputs: Any) -> None:
    """Call the model once to learn: what all ranks compute alike may draw nothing, and nobody may read the weights of
    layers that are split."""
    watched = copy.deepcopy(model).train()
    inner = {module for share in shares for module in share.modules() if module is not share}
    for share in shares:
        if share in inner:
            continue
        stand_in = InOnePiece(watched.get_submodule(share.path), share.comm, share.path)
        if share.path:
            watched.set_submodule(share.path, stand_in)
    drop_alike(watched, 0)
    with NoDrawing():
        watched(inputs)


def survey(model: nn.Module, layout: Layout, inputs: Any) -> list[Layer]:
    """All layers that have parameters or send something, in the order of the model. Refuses what cannot be split."""
    calls = _calls(model, inputs)
    part = check(model, layout, inputs)
    sends = _boundaries(model, part, layout, inputs) if layout.pipeline > 1 else {}
    for module in part.modules():
        if isinstance(module, Tiled):
            sends = {path: ("on tiles", sent) for path, sent in module.traffic(inputs).items()}
    shared = {m.path: m for m in part.modules() if isinstance(m, Split)}
    found, known = [], set[nn.Module]()
    for name, module in model.named_modules(remove_duplicate=False):
        if any(name.startswith(f"{path}.") for path in shared):
            continue
        own = shared.get(name)
        stage_number, sent = sends.get(name, ("", 0))
        whole = 0 if module in known else sum(p.numel() for p in module.parameters(recurse=own is not None))
        known.add(module)
        if not whole and not sent:
            continue
        if own:
            sent += sum(own.traffic(args, output) * output.element_size() for args, output in calls[name])
        mine = sum(p.numel() for p in own.parameters()) if own else whole
        how = [stage_number] * bool(stage_number) + ([own.how] if own else ["replicated"] * (not stage_number))
        found.append(Layer(name, type(module).__name__, ", ".join(how), whole, mine, sent, stage_number))
    return found


def _boundaries(model: nn.Module, part: nn.Module, layout: Layout, inputs: Any) -> dict[str, tuple[str, int]]:
    """Of each layer of a pipeline: its stage, and what is sent behind it, there and back, micro-batch by micro-batch.

    Where layers are split, every rank sends what it has to the one with the same share of the next stage: all of an
    activation or, within a pair, its share.
    """
    layers = layers_of(copy.deepcopy(model), layout.pipeline)
    apart = _kept_apart([layer.module for layer in layers_of(part, layout.pipeline)])
    ends = ends_of(layers, layout, inputs, timed=True)
    with generators_as_they_were():
        outputs = [output for _, output in in_turn(layers, inputs)]
    found, least = {}, least_samples(model)
    for number, (begin, end) in enumerate(pairwise([0, *ends])):
        for at in range(begin, end):
            path, output = layers[at].path, outputs[at]
            last = at + 1 == end and end < len(layers)
            shares = torch.split(output, apart[at], -1) if apart[at] else [output] * layout.tensor
            sent = sum(_there_and_back(layout, share, least) for share in shares) if last else 0
            found[path] = f"stage {number + 1}", sent
    return found


def _kept_apart(layers: list[nn.Module]) -> list[list[int]]:
    """Behind each layer, the shares of the ranks in what it gives, where it is kept apart within a pair."""
    found: list[list[int]] = []
    for layer in layers:
        if isinstance(layer, Split):
            found.append(layer.sizes if isinstance(layer, ByOutputs) and not layer.gathered else [])
        else:
            found.append(found[-1] if found else [])
    return found


def _there_and_back(layout: Layout, output: Tensor, least: int) -> int:
    parts = output.tensor_split(pieces(layout.schedule, layout.pipeline, layout.microbatches, len(output), least))
    return (1 + output.requires_grad) * sum(Message("x", (1,), (part,)).nbytes for part in parts)


def _calls(model: nn.Module, inputs: Any) -> Calls:
    """What each layer gets and gives in a step."""
    watched = copy.deepcopy(model).train()
    calls: Calls = defaultdict(list)
    for name, module in watched.named_modules():

        def note(_: nn.Module, args: tuple[Any, ...], output: Any, name: str = name) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor):
                calls[name].append((tuple(a for a in args if isinstance(a, Tensor)), first))

        module.register_forward_hook(note)
    with generators_as_they_were():
        watched(inputs)
    return calls


def unconnected(size: int) -> Comm:
    """A communicator of so many ranks, in which nobody says anything: for what only asks how many there are."""
    return LocalComm(ThreadWorld(size, 1.0), 0, range(size), 0)
