"""A worker whose model is split over several ranks: where its gradients come from."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from hocket.core.clock import RealClock
from hocket.core.comm import Rank
from hocket.core.errors import UserError
from hocket.core.replica import Replica
from hocket.drivers.gradients import Gradients, WholeModel
from hocket.drivers.pipelined import Pipelined
from hocket.drivers.session import Session
from hocket.layouts.mesh import Layout, Mesh
from hocket.layouts.placing import place
from hocket.layouts.portion import Portion
from hocket.measure.sometimes import Sometimes
from hocket.optim import ELEMENTWISE
from hocket.strategies import Strategy
from hocket.tasks import SampleSet, Task


def check_layout(layout: Layout, chosen: Strategy) -> None:
    """Refuse a strategy whose workers cannot be several ranks."""
    if layout.ranks > 1 and (chosen.server_ranks() or not chosen.lockstep or "shared-memory" in chosen.needs):
        raise UserError(
            f"strategy {chosen.name}: the parts of a split model take their steps together, without servers and "
            f"shared memory; leave the layout out, or use a strategy such as allreduce, local-sgd or diloco"
        )


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


def split_for_a_loop(
    session: Session, mesh: Mesh, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Replica, Portion]:
    """This rank's part of a model that the user's loop trains; the optimizer gets its parameters in place of all."""
    if mesh.layout.pipeline > 1:
        raise UserError("a pipeline takes its batches apart, which a loop of your own cannot; use hocket.fit for it")
    if optimizer.state:
        raise UserError("the optimizer has taken steps on the whole model; make a new one, and prepare it first")
    if type(optimizer) not in ELEMENTWISE.values():
        name = type(optimizer).__name__
        raise UserError(f"optimizer {name} may look at whole layers, and a layout splits them; use SGD or Adam")
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [[names[id(p)] for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
    placed = place(model, mesh, session.beside(mesh.within), next(model.parameters()).device)
    own = dict(zip(map(placed.portion.name_of, placed.replica.names), placed.replica.parameters, strict=True))
    for group, wanted in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [own[name] for name in wanted]
    placed.portion.optimized = [name for wanted in groups for name in wanted]
    return placed.replica, placed.portion
