"""A worker whose model is split over several ranks: where its gradients come from."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from hocket.core.clock import RealClock
from hocket.core.comm import Rank
from hocket.core.replica import Replica
from hocket.drivers.gradients import Gradients, WholeModel
from hocket.drivers.pipelined import Pipelined
from hocket.drivers.session import Session
from hocket.layouts.mesh import Mesh
from hocket.layouts.placing import place
from hocket.layouts.portion import Portion
from hocket.measure.sometimes import Sometimes
from hocket.tasks import SampleSet, Task


def seat(rank: Rank, mesh: Mesh) -> Rank:
    """A rank's place among those that have the same part of other models. Of the ranks of one model, all of which see
    the same, the first one speaks."""

    def tell(kind: str, data: dict[str, Any], blob: bytes) -> None:
        if mesh.model.rank == 0 or kind == "events":
            rank.tell(kind, data, blob)

    return dataclasses.replace(rank, comm=mesh.data, tell=tell)


class SplitModel(WholeModel):
    """A model that talks to its other parts while it computes, and otherwise looks like a whole one."""

    def __init__(self, task: Task, replica: Replica, train: SampleSet, comm: Sometimes, ranks: int) -> None:
        super().__init__(task, replica, train, work=1 / ranks)
        self._comm = comm

    def evaluate(self, samples: SampleSet, index: Tensor) -> Tensor:
        with self._comm.uncounted():
            return super().evaluate(samples, index)


def split_gradients(
    session: Session,
    mesh: Mesh,
    task: Task,
    model: nn.Module,
    train: SampleSet,
    device: torch.device,
    batch: int,
) -> tuple[Gradients, Portion]:
    """Where this rank's gradients come from, and what it has of the model."""
    comm, clock = Sometimes(session.beside(mesh.within), mesh.within), session.rank.clock
    with clock.paused(), comm.uncounted():
        tried = train.take(torch.arange(min(batch, len(train))))[0]
        placed = place(model, mesh, comm, device, tried, timed=isinstance(clock, RealClock))
    if mesh.layout.pipeline == 1:
        return SplitModel(task, placed.replica, train, comm, mesh.layout.ranks), placed.portion
    between = Sometimes(session.beside(mesh.stages), mesh.stages)
    return Pipelined(task, placed.replica, train, mesh.layout, between, comm, clock, batch), placed.portion
