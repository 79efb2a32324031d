"""Hocket's own training loop for an engine that drives all workers at once: `train_in_step` on rows of a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from hocket import optim
from hocket.compress import Identity
from hocket.core.clock import RealClock
from hocket.core.collectives import Algorithm
from hocket.core.comm import Comm, Rank
from hocket.core.errors import UserError
from hocket.core.means import Payload
from hocket.core.replica import Gradient
from hocket.core.seeds import seed_everything, stream
from hocket.core.shard import Shards
from hocket.core.weight import Weight
from hocket.core.worker import Worker
from hocket.drivers.batched import REHEARSALS, Rows
from hocket.drivers.course import Verdict
from hocket.drivers.gradients import WholeModel
from hocket.drivers.held_back import held_back
from hocket.drivers.judge import Judge, finite
from hocket.drivers.losses_of_all import LossesOfAll
from hocket.drivers.own_loop import device_of
from hocket.drivers.plan import Cadence, Plan
from hocket.drivers.report import tell_tensors
from hocket.drivers.schedule import Schedule
from hocket.engines.fleet import FleetTime
from hocket.tasks import SampleSet, Task


class Column:
    """One number a worker, as a column: what a strategy may do with the number of one, it may do with all."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    @cached_property
    def idle(self) -> tuple[Tensor, np.ndarray[Any, np.dtype[np.bool_]]]:
        """Whose is 0, there and in main memory; a GPU is asked for it once."""
        found = (self.numbers == 0).squeeze(1)
        return found, found.cpu().numpy()

    def __add__(self, other: Any) -> Column:
        return Column(self.numbers + (other.numbers if isinstance(other, Column) else other))

    __radd__ = __add__

    def __bool__(self) -> bool:
        return bool(self.numbers.any())


class AllWorkers(Worker):
    """What a strategy has in hand: every worker's at once."""

    updates: Any = 0
    """How many steps of the optimizer each has taken: a number that all have alike, or one for each."""

    def descend(self, g: Gradient, stale: int = 0) -> None:
        """Who has no samples takes no step."""
        samples: Any = g.samples
        if not isinstance(samples, Column):
            self.updates += int(samples > 0)
            super().descend(g, stale)
            return
        idle, known = samples.idle
        self.updates = self.updates + ~known
        kept = [(t, t[idle]) for t in (self.x, *self.optimizer_state())] if known.any() else []
        self._optimizer_step()
        for tensor, rows in kept:
            tensor[idle] = rows

    def _mean(
        self,
        payload: Payload,
        weight: Weight,
        count: Tensor,
        comm: Comm | None = None,
        algorithm: Algorithm = "auto",
    ) -> float:
        rows: Any = comm or self.comm
        samples: Any = weight.samples
        if rows.size == 1:
            return weight.samples
        if weight.of_all == 0:
            samples, weight = 1.0, Weight(1.0, rows.size)
        factor = samples.numbers if isinstance(samples, Column) else samples
        values = [t for t in (*payload.lossy, *payload.exact) if t.numel()]
        if weight.of_all is not None:
            relative = factor * rows.size / weight.of_all
            for part in values if isinstance(relative, Tensor) or relative != 1 else []:
                part.mul_(relative)
            if values:
                rows.reduce(values, "mean")
            return weight.of_all
        for part in values:
            part.mul_(factor)
        count.copy_(factor.squeeze(1) if isinstance(factor, Tensor) else torch.full_like(count, factor))
        rows.reduce([*values, count[:, None]])  # it travels behind the values
        for part in values:
            part.div_(count[:, None])
        of_all: Any = Column(count[:, None])
        return cast(float, of_all)  # a column stands for one


@dataclass(frozen=True)
class Alone:
    """The one that evaluates."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor, op: str = "sum") -> None:
        pass

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        pass


def refuse(plan: Plan, task: Task, samples: int) -> None:
    """What all workers at once cannot do."""
    remedy = "use --engine sim"
    if not plan.made_strategy.lockstep:
        raise UserError(f"strategy {plan.made_strategy.name} has workers at a pace of their own; {remedy}")
    if plan.checkpoint != Cadence() or plan.resume:
        raise UserError(f"all workers at once write no checkpoints; {remedy}")
    if plan.timeline:
        raise UserError(f"all workers at once log no events for a timeline; leave it out, or {remedy}")
    if not isinstance(plan.made_compressor, Identity):
        raise UserError(f"what all workers send at once is not compressed; leave compress out, or {remedy}")
    if task.on_step or task.on_epoch:
        raise UserError(f"all workers at once have no model of their own for Task.on_step and on_epoch; {remedy}")
    name, _ = optim.parse(plan.optimizer)
    if name not in optim.ELEMENTWISE:
        raise UserError(f"optimizer {name} looks at whole layers, not at all workers at once; {remedy}")
    shards = Shards(samples, plan.workers, plan.batch, plan.seed)
    if shards.step_samples(shards.steps - 1) < plan.workers and not optim.takes_momentum(plan.optimizer):
        raise UserError(
            f"the last step of an epoch leaves workers without samples, and {name} counts each one's steps; "
            f"use another batch, or {remedy.removeprefix('use ')}"
        )


def run_all(rank: Rank, plan: Plan, task: Task, train: SampleSet, test: SampleSet) -> list[dict[str, Any]]:
    """The life of all workers; returns one report for each."""
    if plan.device == "cpu":
        torch.set_num_threads(1)  # as each has in `sim`
    return AllAtOnce(rank, plan, task, *held_back(plan, task, train), test).run()


def _length_of_each(g: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(g, dim=1, keepdim=True)
    return found


class AllAtOnce:
    """The training of all workers."""

    def __init__(
        self, rank: Rank, plan: Plan, task: Task, train: SampleSet, validation: SampleSet | None, test: SampleSet
    ) -> None:
        clock: Any = rank.clock
        self._rank, self._plan = rank, plan
        self._time: FleetTime = clock.time
        device = device_of(plan.device, 0)
        self._shards = Shards(len(train), plan.workers, plan.batch, plan.seed)
        self._stride = max(round(plan.evaluate_every * self._shards.steps), 1)
        self._rows = Rows(task, train.to(device), plan.workers)
        first = WholeModel(task, self._rows.replica(0, task.build_model(plan.seed), device), train.to(device))
        self._first, self._all, self._at_once = first, self._rows.stack(), self._rows.at_once()
        alone: Any = Alone()
        judged = validation.to(device) if validation else None
        self._judge = Judge(
            rank, alone, first, task, train, test.to(device), judged, of_each=plan.own_metrics,
            on_train=plan.train_metrics,
        )  # fmt: skip
        self._tested: dict[str, float | None] = {}
        optimizer = optim.make_flat(plan.optimizer, self._all.x, self._all.g, plan.lr, plan.momentum)
        self._schedule = Schedule(plan, optimizer, self._shards.steps, task.own_schedule)
        step = optim.clipped(optim.step_of(optimizer), self._all.g, plan.clip, _length_of_each)
        self._worker = AllWorkers(rank.comm, rank.clock, self._all, optimizer, plan.seed, step, batch=plan.batch)
        self._real = RealClock()
        self._losses = LossesOfAll(plan.workers)
        self._samples = np.zeros(plan.workers, dtype=np.int64)
        self._weights: dict[int, Weight] = {}
        """By the step in an epoch: each epoch has the same."""
        self._verdict: Verdict = "finished"

    def run(self) -> list[dict[str, Any]]:
        steps, worker, brake = self._shards.steps, self._worker, self._rank.brake
        self._initial_loss = self._judge.initial_loss()
        self._rehearse()
        seed_everything(stream(self._plan.seed, "model", 0))
        self._real = RealClock()
        self._strategy = self._plan.made_strategy.worker(worker)
        next(self._strategy)
        self._rank.tell("begun", {}, b"")
        for step in range(self._plan.steps):
            if step and step % self._stride == 0 and self._look(final=False):
                break
            self._step(*divmod(step, steps))
            if brake.pauses_after(worker.step) and brake.purpose == "stop":
                self._verdict = "interrupted"
                break
        before = self._all.values.clone()
        try:
            self._strategy.send(None)
        except StopIteration:
            pass
        self._time.meet(self._plan.workers, 0.0)  # the run lasts as long as its slowest worker
        self._look(final=True)
        real_s = self._real.now()
        tell_tensors(self._rank, self._first.portion)
        self._rank.tell("model", {}, b"")
        return self._reports(real_s, self._of_each(before))

    def _rehearse(self) -> None:
        """Before the clock starts: what the first calls take longer for, as what is recorded, or captured."""
        order = self._shards.order(0).to(self._all.x.device)
        with self._rows.rehearsing():
            for step in [*{0, self._shards.steps - 1}] * REHEARSALS:
                self._compute(self._shards.global_batch(order, step), self._counts(step))

    def _step(self, epoch: int, step: int) -> None:
        """One gradient of every worker, and what the strategy makes of them."""
        worker, status = self._worker, self._rank.status
        status.stop()
        counts = self._counts(step)
        status.lr = self._schedule.set(epoch * self._shards.steps + step + 1)
        began_s = self._time.now_s.copy()
        self._time.charge(counts / self._plan.batch)
        if step == 0:
            self._order = self._shards.order(epoch).to(self._all.x.device)
        losses = self._compute(self._shards.global_batch(self._order, step), counts)
        worker.step += 1
        self._losses.add(losses, counts, began_s, worker.step)
        self._samples += counts
        status.step, status.samples = worker.step, int(self._samples[0])
        self._strategy.send(Gradient(self._all.g, self._weight(step, counts)))

    def _counts(self, step: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """How many samples each worker has in this step of an epoch."""
        least, more = divmod(self._shards.step_samples(step), self._plan.workers)
        return least + (np.arange(self._plan.workers) < more).astype(np.int64)

    def _weight(self, step: int, counts: np.ndarray[Any, np.dtype[np.int64]]) -> Weight:
        if step not in self._weights:
            even = counts[0] == counts[-1]
            each: Any = float(counts[0]) if even else Column(torch.from_numpy(counts).to(self._all.x)[:, None])
            self._weights[step] = Weight(each, float(counts.sum()))
        return self._weights[step]

    def _compute(self, index: Tensor, counts: np.ndarray[Any, np.dtype[np.int64]]) -> Tensor:
        """All gradients; returns the losses. Workers with equally many samples lie next to each other."""
        losses, at, row = [], 0, 0
        ends = [*(np.flatnonzero(np.diff(counts)) + 1).tolist(), len(counts)]
        for end in ends:
            while row < end:
                rows, each = range(row, min(row + self._at_once, end)), int(counts[row])
                if each:
                    losses.append(self._rows.gradients(rows, index[at : at + len(rows) * each]))
                else:
                    self._all.g[rows.start : rows.stop].zero_()
                    losses.append(self._all.g.new_zeros(len(rows)))
                at, row = at + len(rows) * each, rows.stop
        return torch.cat(losses)

    def _look(self, *, final: bool) -> bool:
        """Evaluate what the run would return now, outside all clocks. True ends the run."""
        with self._real.paused():
            train_loss, diverged = self._losses.look()
            self._rank.status.loss = train_loss
            values = self._first.replica.values if final else self._mean()
            step = self._worker.step
            score = self._judge.together(values, step, step / self._shards.steps)
            if final:
                self._tested = self._judge.in_the_end(values)
            self._judge.record(self._shards, step, self._rank.clock.now(), train_loss, score)
            self._rows.confirm()
            if diverged:
                self._verdict = "diverged"
            elif self._verdict == "finished" and self._plan.goal.reached(score.metric):
                self._verdict = "reached-target"
        return self._verdict != "finished"

    def _mean(self) -> Tensor:
        """Of all replicas, each by its weight."""
        found: tuple[Tensor, Any] = self._plan.made_strategy.part(self._worker)
        x, weight = found
        values = self._all.values.clone()
        values[:, : x.shape[1]] = x
        if isinstance(weight, Column):
            numbers = torch.where(weight.numbers == 0, 1.0, weight.numbers)
            values *= numbers / numbers.mean()
        mean: Tensor = values.mean(0)
        return mean

    def _of_each(self, values: Tensor) -> list[dict[str, Any]]:
        """How far the replicas were apart before the farewell and, on request, how good each was."""
        mean = values.mean(0)
        # One by one: for all at once it would take five more vectors for each worker
        square = torch.stack([(row - mean).double().square().sum() for row in values]).mean()
        apart = finite(float(square.sqrt()))
        known: list[dict[str, Any]] = [{"consensus_distance": apart} for _ in values]
        if self._plan.own_metrics and apart:
            for one, row in zip(known, values, strict=True):
                one["own_metric"] = self._judge.own_metric(row)
        return known

    def _reports(self, real_s: float, of_each: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """As drivers/report.py has them."""
        step, time, seconds = self._worker.step, self._time, self._rank.clock.now()
        updates = np.broadcast_to(self._worker.updates, self._plan.workers)
        common: dict[str, Any] = {
            "verdict": self._verdict,
            "seconds": seconds,
            "real_seconds": real_s,
            "steps": step,
            "steps_done": step,
            "epochs": step / self._shards.steps,
            "stride": self._stride,
            "initial_loss": finite(self._initial_loss),
            "parameters": self._all.x.shape[1],
            "messages": 0,
            "dropped_events": 0,
            "stretches": {},
            "sending": 0.0,
            "locks": 0.0,
            "tested": self._tested,
        }
        return [
            common
            | {
                "samples": int(self._samples[r]),
                "staleness": {"0": int(updates[r])},
                "bytes_sent": time.bytes_sent(r),
                "computing": max(seconds - float(time.waiting_s[r] + time.transferring_s[r]), 0.0),
                "transferring": float(time.transferring_s[r]),
                "communicating": float(time.transferring_s[r]),
                "exposed": float(time.transferring_s[r]),
                "waiting": float(time.waiting_s[r]),
                "losses": self._losses.of(r),
                "diverged_at_step": self._losses.diverged_at(r),
                "curve": self._judge.curve if r == 0 else [],
                **of_each[r],
            }
            for r in range(self._plan.workers)
        ]
