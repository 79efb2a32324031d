"""Gives a rank its part of a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from hocket.core.comm import Comm
from hocket.core.modules import check_module
from hocket.core.replica import Replica
from hocket.layouts.mesh import Mesh
from hocket.layouts.portion import Outline, PartOfIt, origins
from hocket.layouts.tensor import split


@dataclass(frozen=True)
class Placed:
    """A rank's part of a model, and how it becomes the whole again."""

    replica: Replica
    portion: PartOfIt


def place(model: nn.Module, mesh: Mesh, within: Comm, device: torch.device) -> Placed:
    """This rank's part. `within` is the mesh's communicator of that name, decorated."""
    check_module(model)
    for tensor in (*model.parameters(), *model.buffers()):
        mesh.everyone.broadcast(tensor.data)  # a Task may hold a module with weights of its own
    outline = Outline(model)
    part = split(model, within)
    found = origins(outline, part)
    replica = Replica(part, device)
    return Placed(replica, PartOfIt(outline, replica, found, mesh.model, counts=mesh.within.rank == 0))
