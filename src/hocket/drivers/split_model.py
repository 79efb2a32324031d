"""A worker whose model is split over several ranks: where its gradients come from."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from hocket.core.comm import Rank
from hocket.drivers.gradients import Gradients, WholeModel
from hocket.drivers.session import Session
from hocket.layouts.mesh import Mesh
from hocket.layouts.placing import place
from hocket.layouts.portion import Portion
from hocket.tasks import SampleSet, Task


def seat(rank: Rank, mesh: Mesh) -> Rank:
    """A rank's place among those that have the same part of other models. Of the ranks of one model, all of which see
    the same, the first one speaks."""

    def tell(kind: str, data: dict[str, Any], blob: bytes) -> None:
        if mesh.model.rank == 0 or kind == "events":
            rank.tell(kind, data, blob)

    return dataclasses.replace(rank, comm=mesh.data, tell=tell)


def split_gradients(
    session: Session, mesh: Mesh, task: Task, model: nn.Module, train: SampleSet, device: torch.device
) -> tuple[Gradients, Portion]:
    """Where this rank's gradients come from, and what it has of the model."""
    placed = place(model, mesh, session.comm.around(mesh.within), device)
    return WholeModel(task, placed.replica, train, work=1 / mesh.layout.ranks), placed.portion
