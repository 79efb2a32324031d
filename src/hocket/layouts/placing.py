"""Gives a rank its part of a model."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from hocket.core.comm import Comm
from hocket.core.modules import check_module
from hocket.core.replica import Replica
from hocket.layouts.blueprint import Blueprint, give_memory
from hocket.layouts.domain import tiled
from hocket.layouts.dropout import check_dropout, drop_alike, watch_for_drawing
from hocket.layouts.mesh import Mesh
from hocket.layouts.outline import Outline
from hocket.layouts.pipeline import ends_of, in_words, layers_of, stage
from hocket.layouts.portion import PartOfIt, origins
from hocket.layouts.split import Cut
from hocket.layouts.tensor import split


@dataclass(frozen=True)
class Placed:
    """A rank's part of a model, and how it becomes the whole again."""

    replica: Replica
    portion: PartOfIt


def stage_of(model: nn.Module, mesh: Mesh, inputs: Any, *, timed: bool) -> tuple[nn.Sequential, str]:
    """This rank's layers, and how many each stage has. All ranks measure, since layers that are split need all of them;
    what the first one found counts, also for servers, which have no inputs."""

    def agree(costs: list[float]) -> list[float]:
        found = torch.tensor(costs, dtype=torch.float64)
        mesh.world.broadcast(found)
        return found.tolist()

    layers = layers_of(model, mesh.layout.pipeline)
    ends = ends_of(layers, mesh.layout, inputs, timed=timed, agree=agree)
    return stage(layers, ends, mesh.stages.rank), in_words(ends)


def place(
    model: nn.Module | Blueprint,
    mesh: Mesh,
    within: Comm,
    device: torch.device,
    inputs: Any = None,
    *,
    timed: bool = True,
) -> Placed:
    """This rank's part of a model, or of one that is yet to be made: then no rank ever has more than its part and one
    whole tensor. `within` is the mesh's communicator of that name, decorated; `inputs` is a batch to measure the layers
    of a pipeline with, in seconds if it is to be `timed`."""
    if isinstance(model, Blueprint):
        whole = model.model
    else:
        check_module(model)
        whole = model
        for tensor in (*whole.parameters(), *whole.buffers()):
            values = tensor.data.contiguous()
            mesh.world.broadcast(values)  # a Task may hold a module with weights of its own
            tensor.data.copy_(values)
    outline = Outline(whole)
    part, stages = whole, ""
    if mesh.within.size > 1:
        check_dropout(part)
    if mesh.layout.tensor > 1:
        part = split(part, within)
    if mesh.layout.rows * mesh.layout.columns > 1:
        part = tiled(part, within, mesh.layout)
    if mesh.within.size > 1:
        drop_alike(part, mesh.data.rank)
    if mesh.layout.pipeline > 1:
        part, stages = stage_of(part, mesh, inputs, timed=timed)
    found = origins(outline, part)
    if isinstance(model, Blueprint):
        give_memory(part)
    if mesh.within.size > 1:
        watch_for_drawing(part)
    replica = Replica(part, device)
    if isinstance(model, Blueprint):
        _fill(replica, found, model, mesh.world)
    return Placed(replica, PartOfIt(outline, replica, found, mesh.model, within, mesh.within, stages))


def _fill(replica: Replica, origins: dict[str, tuple[str, Cut]], blueprint: Blueprint, everyone: Comm) -> None:
    """The first rank makes one tensor of the model after the other, and each keeps what it has of it."""
    tensors = dict(chain(replica.model.named_parameters(), replica.model.named_buffers()))
    own: dict[str, list[tuple[Tensor, Cut]]] = defaultdict(list)
    for name, tensor in (tensors | dict(zip(replica.names, replica.places, strict=True))).items():
        whole, cut = origins[name]
        own[whole].append((tensor, cut))
    for name in blueprint.names:
        values = blueprint.tensor(name).contiguous() if everyone.rank == 0 else blueprint.blank(name)
        everyone.broadcast(values)
        for tensor, cut in own[name]:
            tensor.data.copy_(cut.of(values))
    replica.spread()
