"""RunSpec -> Plan: every default filled in, and what cannot run refused."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from hocket import optim
from hocket.core.deadline import check_deadline
from hocket.core.errors import UserError
from hocket.core.registry import convert
from hocket.core.shard import Shards
from hocket.core.units import seconds
from hocket.drivers.held_back import validation_samples
from hocket.drivers.plan import Cadence, Goal, Plan, compressor_for
from hocket.drivers.schedule import rates_of
from hocket.layouts.mesh import Layout
from hocket.optim.schedules import OWN
from hocket.run.blame import blaming
from hocket.run.spec import RunSpec, settings, type_of
from hocket.strategies import Strategy, strategy
from hocket.tasks import Task

WORKERS = 2
"""How many workers, unless the strategy or the user says otherwise."""
LARGEST_LR = 1e38
"""What a float32 can hold."""
MOST_LOADERS = 1000
MOST = 2**53
"""Whole numbers beyond it are none any more once they have been floats."""


def resolve(spec: RunSpec, task: Task, samples: int) -> Plan:
    """The plan that a spec stands for. `samples` is how many the task trains on."""
    check_numbers(spec)
    named = spec.strategy or task.strategy
    chosen, layout = strategy.make(named), Layout.parse(spec.layout)
    workers = _workers(spec, chosen, layout)
    optimizer: str = _given(spec, task, "optimizer")
    validation = _validation(spec, task)
    samples -= validation_samples(validation, samples)
    batch = _batch(spec, task, workers, samples)
    _check_together(spec, task, chosen, layout, optim.parse(optimizer)[0])
    lr: float = _of_optimizer(spec, task, optimizer, "lr", optim.RATES)
    _check_lr(spec, lr, workers)
    plan = Plan(
        task=spec.task,
        data=spec.data or "",
        test_data=spec.test_data or "",
        strategy=named,
        workers=workers,
        steps=spec.steps or Shards(samples, workers, batch, spec.seed).steps * _given(spec, task, "epochs"),
        batch=batch,
        lr=lr,
        lr_decay=_given(spec, task, "lr_decay"),
        lr_falls=task.lr_falls,
        scale_lr=spec.scale_lr,
        warmup=spec.warmup,
        momentum=_momentum(spec, task, optimizer),
        optimizer=optimizer,
        schedule=OWN if spec.schedule is None and task.own_schedule else _given(spec, task, "schedule"),
        clip=spec.clip,
        accumulate=spec.accumulate,
        autocast=spec.autocast,
        loaders=spec.loaders,
        seed=spec.seed,
        validation=validation,
        goal=Goal.never() if spec.target is None else Goal(spec.target, task.lower_is_better),
        evaluate_every=1.0 if spec.evaluate_every is None else spec.evaluate_every,
        own_metrics=spec.own_metrics,
        train_metrics=spec.train_metrics,
        device=spec.device,
        trace=spec.trace,
        checkpoint=cadence(spec.checkpoint_every),
        resume="",
        compress=spec.compress,
        timeline=spec.timeline,
        layout=spec.layout,
    )
    _check_schedule(plan, task, Shards(samples, workers, batch, spec.seed).steps)
    return plan


def _check_schedule(plan: Plan, task: Task, steps_per_epoch: int) -> None:
    """Work out the last rate, since a schedule may be too short."""
    with blaming("Task.schedule"):
        if rates := rates_of(plan, steps_per_epoch, task.own_schedule):
            rates.at(plan.steps - 1 if rates.per_step else (plan.steps - 1) // steps_per_epoch)


def _workers(spec: RunSpec, chosen: Strategy, layout: Layout) -> int:
    """How many there are, each of as many ranks as the layout splits a model over."""
    workers = default_workers(chosen) if spec.workers is None else spec.workers
    if spec.layout:
        workers = layout.over(spec.workers).data
    chosen.check(workers)
    return workers


def _check_together(spec: RunSpec, task: Task, chosen: Strategy, layout: Layout, optimizer: str) -> None:
    """Refuse settings that do not go with the task, the strategy, or each other."""
    if spec.target is not None:
        task.check_target(spec.target)
    compressor_for(spec.compress, chosen)
    if layout.ranks > 1:
        _check_split(spec, task, layout, optimizer)
    if spec.clip and chosen.lockstep and chosen.server_ranks() > 1:
        raise UserError("clip needs the whole gradient in one place; use one server, or leave --clip out")


def _check_split(spec: RunSpec, task: Task, layout: Layout, optimizer: str) -> None:
    """Refuse what needs a whole model, where each rank has a part of it."""
    if layout.shares_layers and optimizer not in optim.ELEMENTWISE:
        raise UserError(f"optimizer {optimizer} looks at whole layers, and a layout splits them; use sgd or adam")
    if layout.pipeline == 1:
        return
    if task.evaluate is not None:
        raise UserError("Task.evaluate needs the whole model, which a pipeline has on no rank; use metrics, or tensor=")
    if spec.accumulate > 1 or spec.loaders:
        raise UserError("a pipeline takes batches apart itself: leave accumulate and loaders out, use microbatches=")


def _validation(spec: RunSpec, task: Task) -> float:
    """The share of the training samples that is kept back."""
    share = task.validation if isinstance(task.validation, (int, float)) else None
    if spec.validation is None:
        return float(share or 0.0)
    if task.validation is not None and share is None:
        raise UserError("the task brings validation samples of its own; leave --validation out")
    return spec.validation


def settled(spec: RunSpec, task: Task, plan: Plan, engine: str) -> RunSpec:
    """The spec with all that was decided, so that it alone reproduces the run."""
    names = ("workers", "lr", "lr_decay", "momentum", "optimizer", "evaluate_every")
    decided = {name: getattr(plan, name) for name in names} | {"batch": plan.piece}
    decided["workers"] = plan.training_ranks
    decided["schedule"] = plan.schedule or None
    if plan.validation or isinstance(task.validation, (int, float)):
        decided["validation"] = plan.validation
    epochs = None if spec.steps is not None else _given(spec, task, "epochs")
    return dataclasses.replace(spec, engine=engine, epochs=epochs, **decided)


def default_workers(chosen: Strategy) -> int:
    return min(max(WORKERS, chosen.fewest_workers), chosen.most_workers)


def cadence(text: str) -> Cadence:
    """`2` is epochs, `10min` a time, nothing never."""
    if not text:
        return Cadence()
    if text.isdecimal() and 0 < int(text) < MOST:
        return Cadence(epochs=int(text))
    try:
        if not text.replace(".", "").isdecimal() and (every := seconds(text, "")) > 0:
            return Cadence(seconds=every)
    except UserError:
        pass
    raise UserError(f"checkpoint_every: cannot read {text!r}; write whole epochs like 2, or a time like 30s, 10min, 1h")


def check_numbers(spec: RunSpec) -> None:
    """Refuse numbers that make no sense whatever is trained."""
    if spec.epochs is not None and spec.steps is not None:
        raise UserError("give epochs or steps, not both")
    for name in settings():
        value = getattr(spec, name)
        if isinstance(value, (int, float)):
            _check_number(name, value)
    if not 0 <= spec.seed < 2**40:
        raise UserError(f"seed must be 0 or more and less than 2**40, got {spec.seed}")
    if spec.trace < 0:
        raise UserError(f"trace must be 0 or more, got {spec.trace}")
    check_deadline(spec.deadline)
    cadence(spec.checkpoint_every)


def _check_number(name: str, value: float) -> None:
    if isinstance(value, int) and abs(value) > MOST:
        raise UserError(f"{name} must be at most 2**53, got a number of {len(str(abs(value)))} digits")
    if not math.isfinite(value):
        raise UserError(f"{name} must be finite, got {value}")
    match name:
        case "workers" | "epochs" | "steps" | "batch" | "accumulate" if value < 1:
            raise UserError(f"{name} must be 1 or more, got {value}")
        case "lr" if value <= 0:
            raise UserError(f"lr must be greater than 0, got {value:g}")
        case "lr_decay" if not 0 < value <= 1:
            raise UserError(f"lr_decay must be greater than 0 and at most 1, got {value:g}")
        case "momentum" if not 0 <= value < 1:
            raise UserError(f"momentum must be at least 0 and less than 1, got {value:g}")
        case "validation" if not 0 <= value < 1:
            raise UserError(f"validation must be a share from 0 to below 1, got {value:g}")
        case "clip" if value < 0:
            raise UserError(f"clip must be greater than 0, or 0 for none, got {value:g}")
        case "loaders" if not 0 <= value <= MOST_LOADERS:
            raise UserError(f"loaders must be from 0 to {MOST_LOADERS}, got {value}")
        case "evaluate_every" if not 0 < value <= MOST:
            raise UserError(f"evaluate_every must be more than 0 epochs, got {value:g}")
        case "warmup" if not 0 <= value <= MOST:
            raise UserError(f"warmup must be 0 or more epochs, got {value:g}")


def _given(spec: RunSpec, task: Task, name: str) -> Any:
    """What the spec says, or else the task."""
    value = getattr(spec, name)
    if value is None:
        value = convert(getattr(task, name), type_of(settings()[name]), f"Task.{name}")
        if value is None:
            raise UserError(f"Task.{name} must not be None; leave it out, or give it a value")
        if isinstance(value, (int, float)):
            _check_number(name, value)
    return value


def _of_optimizer(spec: RunSpec, task: Task, optimizer: str, name: str, rates: Mapping[str, float]) -> float:
    """What the spec says, or the task if this is its own optimizer, or else what such an optimizer begins with."""
    kind, own = (optim.parse(text)[0] for text in (optimizer, task.optimizer))
    if getattr(spec, name) is None and kind != own:
        return rates.get(kind, 0.0)
    return float(_given(spec, task, name))


def _momentum(spec: RunSpec, task: Task, optimizer: str) -> float:
    takes_it = optim.takes_momentum(optimizer)
    if spec.momentum and not takes_it:
        raise UserError(f"optimizer {optimizer} takes no momentum; leave --momentum out, or use --optimizer sgd")
    return _of_optimizer(spec, task, optimizer, "momentum", optim.MOMENTA) if takes_it else 0.0


def _check_lr(spec: RunSpec, lr: float, workers: int) -> None:
    if lr * (workers if spec.scale_lr else 1) > LARGEST_LR:
        raise UserError(f"lr must be at most {LARGEST_LR:g} (for all workers together), got {lr:g}")


def _batch(spec: RunSpec, task: Task, workers: int, samples: int) -> int:
    """Samples of a gradient; where the user gives no number, no more of them than a worker has."""
    shard = samples // workers
    if shard == 0:
        raise UserError(f"{workers} workers cannot share {samples} samples; use --workers {samples} or fewer")
    batch: int = _given(spec, task, "batch") * spec.accumulate
    if spec.batch is None and spec.accumulate == 1:
        batch = min(batch, shard)
    if batch > shard:
        together = "1 worker" if workers == 1 else f"{workers} workers"
        raise UserError(
            f"batch {batch} is larger than a worker's shard of {shard} samples "
            f"({samples} samples, {together}); use --batch {shard} or fewer workers"
        )
    return batch
