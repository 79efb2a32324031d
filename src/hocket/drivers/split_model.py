"""A worker whose model is split over several ranks: where its gradients come from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hocket.core.comm import Comm, Rank
from hocket.core.forward import Forwarding
from hocket.core.replica import Replica
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


class Sometimes(Forwarding):
    """Counts what training sends, and not what is sent when somebody looks at the model."""

    def __init__(self, metered: Comm, bare: Comm) -> None:
        super().__init__(metered)
        self._bare = bare

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        metered, self.inner = self.inner, self._bare
        try:
            yield
        finally:
            self.inner = metered


class SplitModel(WholeModel):
    """A model that talks to its other parts while it computes, and otherwise looks like a whole one."""

    def __init__(self, task: Task, replica: Replica, train: SampleSet, comm: Sometimes, ranks: int) -> None:
        super().__init__(task, replica, train, work=1 / ranks)
        self._comm = comm

    def evaluate(self, samples: SampleSet, index: Tensor) -> Tensor:
        with self._comm.uncounted():
            return super().evaluate(samples, index)


def split_gradients(
    session: Session, mesh: Mesh, task: Task, model: nn.Module, train: SampleSet, device: torch.device
) -> tuple[Gradients, Portion]:
    """Where this rank's gradients come from, and what it has of the model."""
    comm = Sometimes(session.beside(mesh.within), mesh.within)
    placed = place(model, mesh, comm, device)
    return SplitModel(task, placed.replica, train, comm, mesh.layout.ranks), placed.portion
