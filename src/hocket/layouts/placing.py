"""Gives a rank its part of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hocket.core.comm import Comm
from hocket.core.modules import check_module
from hocket.core.replica import Replica
from hocket.layouts.domain import tiled
from hocket.layouts.dropout import drop_alike
from hocket.layouts.mesh import Mesh
from hocket.layouts.pipeline import ends_of, layers_of, stage
from hocket.layouts.portion import Outline, PartOfIt, origins
from hocket.layouts.tensor import split


@dataclass(frozen=True)
class Placed:
    """A rank's part of a model, and how it becomes the whole again."""

    replica: Replica
    portion: PartOfIt


def stage_of(model: nn.Module, mesh: Mesh, inputs: Any, *, timed: bool) -> nn.Sequential:
    """This rank's layers. All ranks measure, since layers that are split need all of them; what the first one found
    counts."""

    def agree(costs: list[float]) -> list[float]:
        found = torch.tensor(costs, dtype=torch.float64)
        mesh.everyone.broadcast(found)
        return found.tolist()

    layers = layers_of(model, mesh.layout.pipeline)
    return stage(layers, ends_of(layers, mesh.layout, inputs, timed=timed, agree=agree), mesh.stages.rank)


def place(
    model: nn.Module, mesh: Mesh, within: Comm, device: torch.device, inputs: Any = None, *, timed: bool = True
) -> Placed:
    """This rank's part. `within` is the mesh's communicator of that name, decorated; `inputs` is a batch to measure
    the layers of a pipeline with, in seconds if it is to be `timed`."""
    check_module(model)
    for tensor in (*model.parameters(), *model.buffers()):
        whole = tensor.data.contiguous()
        mesh.everyone.broadcast(whole)  # a Task may hold a module with weights of its own
        tensor.data.copy_(whole)
    outline = Outline(model)
    part = drop_alike(model, mesh.data.rank) if mesh.within.size > 1 else model
    if mesh.layout.tensor > 1:
        part = split(part, within)
    if mesh.layout.rows * mesh.layout.columns > 1:
        part = tiled(part, within, mesh.layout)
    if mesh.layout.pipeline > 1:
        part = stage_of(part, mesh, inputs, timed=timed)
    found = origins(outline, part)
    replica = Replica(part, device)
    return Placed(replica, PartOfIt(outline, replica, found, mesh.model, within))
