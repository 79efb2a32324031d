"""A worker whose model is split over several ranks: where its gradients come from."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hocket.core.clock import RealClock
from hocket.core.comm import Rank
from hocket.core.errors import UserError
from hocket.drivers.gradients import WholeModel
from hocket.drivers.pipelined import Pipelined
from hocket.drivers.plan import Plan
from hocket.drivers.session import Session
from hocket.layouts.blueprint import Blueprint, CannotRecord, blueprint_of
from hocket.layouts.mesh import Mesh
from hocket.layouts.microbatches import pieces
from hocket.layouts.pipeline import least_samples
from hocket.layouts.placing import Placed, place
from hocket.measure.sometimes import Sometimes
from hocket.optim import ELEMENTWISE
from hocket.tasks import SampleSet, Task


def norms_apart(plan: Plan, model: nn.Module) -> str:
    """A line for the user, where a pipeline changes what BatchNorm computes."""
    layout = plan.made_layout
    several = layout.pipeline > 1 and pieces(layout.schedule, layout.pipeline, layout.microbatches, plan.batch) > 1
    if not several or not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return ""
    return "BatchNorm goes by each micro-batch, not by the whole batch; schedule=naive has one process's numbers"


def seat(rank: Rank, mesh: Mesh) -> Rank:
    """A rank's place among those that have the same part of other models. Of the ranks of one model, all of which see
    the same, the first one speaks."""

    def tell(kind: str, data: dict[str, Any], blob: bytes) -> None:
        if mesh.model.rank == 0 or kind == "events":
            rank.tell(kind, data, blob)

    return dataclasses.replace(rank, comm=mesh.data, tell=tell)


class SplitModel(WholeModel):
    """A model that talks to its other parts while it computes, and otherwise looks like a whole one."""

    def __init__(self, plan: Plan, task: Task, placed: Placed, train: SampleSet, comm: Sometimes) -> None:
        super().__init__(task, placed.replica, train, piece=plan.piece, autocast=plan.autocasts)
        self.portion, self.work = placed.portion, 1 / plan.made_layout.ranks
        self._comm = comm

    def evaluate(self, samples: SampleSet, index: Tensor) -> Tensor:
        with self._comm.uncounted():
            sums = super().evaluate(samples, index)
            self._comm.broadcast(sums)  # all ranks of the model go by what the first one found
        return sums

    def evaluate_whole(self, samples: SampleSet) -> dict[str, float]:
        with self._comm.uncounted():
            found = super().evaluate_whole(samples)
            values = torch.tensor(list(found.values()), dtype=torch.float64)
            if found:
                self._comm.broadcast(values)
        return dict(zip(found, values.tolist(), strict=True))


def _model(rank: Rank, plan: Plan, task: Task) -> nn.Module | Blueprint:
    """Where it can be, the model is made tensor by tensor: the whole of it may be more than a rank has room for."""
    make = partial(task.build_model, plan.seed)
    if isinstance(task.model, nn.Module):
        return make()
    try:
        return blueprint_of(make)
    except CannotRecord as why:
        if rank.comm.rank == 0:
            rank.tell("note", {"line": f"every rank makes the whole model before it is split: {why}"}, b"")
        return make()


def _tried(plan: Plan, train: SampleSet, least: int) -> Any:
    """What the layers of a pipeline are measured with: a micro-batch."""
    layout, samples = plan.made_layout, min(plan.batch, len(train))
    count = pieces(layout.schedule, layout.pipeline, layout.microbatches, samples, least)
    return train.take(torch.arange(-(-samples // count)))[0]


def split_gradients(
    session: Session, mesh: Mesh, plan: Plan, task: Task, train: SampleSet, device: torch.device
) -> SplitModel | Pipelined:
    """Where this rank's gradients come from."""
    comm = Sometimes(session.beside(mesh.within), mesh.within)
    placed, least = _placed(session, mesh, plan, task, comm, device, train)
    if mesh.layout.pipeline == 1:
        return SplitModel(plan, task, placed, train, comm)
    between = Sometimes(session.beside(mesh.stages), mesh.stages)
    return Pipelined(plan, task, placed, train, between, comm, session.rank.clock, least)


def served_part(session: Session, mesh: Mesh, plan: Plan, task: Task, device: torch.device) -> Placed:
    """The part of a split model that a server has for those workers' ranks that have the same."""
    comm = Sometimes(session.beside(mesh.within), mesh.within)
    return _placed(session, mesh, plan, task, comm, device, None)[0]


def _placed(
    session: Session, mesh: Mesh, plan: Plan, task: Task, within: Sometimes, device: torch.device,
    train: SampleSet | None,
) -> tuple[Placed, int]:  # fmt: skip
    """This rank's part of the model, and how many samples a micro-batch must have; servers have no samples."""
    clock = session.rank.clock
    with clock.paused(), within.uncounted():
        model = _model(session.rank, plan, task)
        mesh.world.barrier()  # measuring layers may draw random numbers, and threads share one generator
        least = least_samples(model.model if isinstance(model, Blueprint) else model)
        tried = None if train is None else _tried(plan, train, least)
        return place(model, mesh, within, device, tried, timed=isinstance(clock, RealClock)), least


def split_for_a_loop(mesh: Mesh, within: Sometimes, model: nn.Module, optimizer: torch.optim.Optimizer) -> Placed:
    """This rank's part of a model that the user's loop trains; the optimizer gets its parameters in place of all."""
    if mesh.layout.pipeline > 1:
        raise UserError("a pipeline takes its batches apart, which a loop of your own cannot; use hocket.fit for it")
    if optimizer.state:
        raise UserError("the optimizer has taken steps on the whole model; make a new one, and prepare it first")
    if mesh.layout.shares_layers and type(optimizer) not in ELEMENTWISE.values():
        name = type(optimizer).__name__
        raise UserError(f"optimizer {name} may look at whole layers, and a layout splits them; use SGD or Adam")
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [[names[id(p)] for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
    placed = place(model, mesh, within, next(model.parameters()).device)
    own = dict(zip(map(placed.portion.name_of, placed.replica.names), placed.replica.parameters, strict=True))
    for group, wanted in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [own[name] for name in wanted]
    placed.portion.optimized = [name for wanted in groups for name in wanted]
    return placed
