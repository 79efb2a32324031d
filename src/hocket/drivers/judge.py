"""How good a model is: evaluation outside the clock, by all workers together or by one alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hocket.core.comm import Comm, Rank
from hocket.core.replica import Replica
from hocket.core.shard import Shards
from hocket.drivers.gradients import Gradients
from hocket.drivers.report import tell_tensors
from hocket.layouts.portion import Portion
from hocket.tasks import SampleSet, Task

ALIKE = 1e-12
"""How far weights are apart at most that are one but for rounding."""
SHARE = 1024
"""Samples that are not worth sharing out: a forward pass has costs of its own."""


@dataclass(frozen=True)
class Score:
    """What was found of a model: its mean loss, the metric that counts, and all metrics by name."""

    loss: float
    metric: float
    metrics: Mapping[str, float]

    def named(self, prefix: str) -> dict[str, float | None]:
        return {f"{prefix}_loss": finite(self.loss)} | {f"{prefix}_{n}": finite(v) for n, v in self.metrics.items()}


class Judge:
    """Evaluates replicas and keeps the learning curve, and the best model on it."""

    def __init__(
        self,
        rank: Rank,
        workers: Comm,
        gradients: Gradients,
        task: Task,
        train: SampleSet,
        test: SampleSet,
        validation: SampleSet | None,
        *,
        of_each: bool,
        on_train: bool,
    ) -> None:
        self._rank, self._workers, self._gradients, self._task = rank, workers, gradients, task
        self._train, self._test, self._of_each, self._on_train = train, test, of_each, on_train
        self.looks_at = "test" if validation is None else "validation"
        """What the learning curve, the goal and the best model go by."""
        self._judged = test if validation is None else validation
        self._best: dict[str, float] | None = None
        """What is known of the model that was judged last, if it is the best so far; its tensors have been told."""
        self.curve: list[dict[str, Any]] = []

    def initial_loss(self) -> float:
        """The training loss of the model as it is; all workers call it together."""
        chosen = min(self._task.glance, len(self._train))
        sums = self._gradients.evaluate(self._train, self._share(chosen))
        self._workers.all_reduce(sums)
        return float(sums[0]) / chosen

    def _share(self, samples: int) -> Tensor:
        """Which of the first samples this worker looks at; of few, the first workers look at all."""
        size = max(SHARE, -(-samples // self._workers.size))
        first = min(self._workers.rank * size, samples)
        return torch.arange(first, min(first + size, samples))

    def together(self, values: Tensor, step: int, epoch: float) -> Score:
        """How good a replica with these values is, the run's after so many steps; each worker takes a share of the
        samples."""
        with self._holding(values, self._judged):
            score = self._together(self._judged)
            if self._workers.rank == 0:
                self._keep_best(score, step, epoch)
        return score

    def _holding(self, values: Tensor, *seen: SampleSet) -> AbstractContextManager[None]:
        """Inside, the replica has these values, where this worker looks at it."""
        looks = self._workers.rank == 0 or any(self._share(len(samples)).numel() for samples in seen)
        return self._gradients.replica.holding(values) if looks else nullcontext()

    def in_the_end(self, values: Tensor) -> dict[str, float | None]:
        """By name what is found on the test samples, where others were judged until now, and on those that were trained
        on, where that is wanted; all workers call it together."""
        found: dict[str, float | None] = {}
        with self._holding(values, self._test, self._train):
            if self._judged is not self._test:
                found |= self._together(self._test).named("test")
            if self._on_train:
                found |= self._together(self._train).named("train")
        return found

    def _together(self, samples: SampleSet) -> Score:
        sums = self._gradients.evaluate(samples, self._share(len(samples)))
        self._workers.all_reduce(sums)
        more = self._gradients.evaluate_whole(samples) if self._workers.rank == 0 else {}
        score = self._score(sums / len(samples), more)
        if self._task.evaluate is None:
            return score
        metric = torch.tensor([score.metric], dtype=torch.float64)
        self._workers.broadcast(metric)  # worker 0 called it alone
        return Score(score.loss, float(metric), score.metrics)

    def alone(self, x: Tensor, step: int, epoch: float) -> Score:
        """The same by this worker alone, while the others go on; `x` may be the parameters without buffers."""
        with self._gradients.replica.holding(x):
            score = self._alone()
            self._keep_best(score, step, epoch)
        return score

    def _alone(self) -> Score:
        sums = self._gradients.evaluate(self._judged, torch.arange(len(self._judged)))
        return self._score(sums / len(self._judged), self._gradients.evaluate_whole(self._judged))

    def _score(self, means: Tensor, more: Mapping[str, float]) -> Score:
        loss, *values = means.tolist()
        metrics = dict(zip(self._task.measures, values, strict=True)) | dict(more)
        return Score(loss, metrics.get(self._task.metric_name, math.nan), metrics)

    def _keep_best(self, score: Score, step: int, epoch: float) -> None:
        key, better = f"{self.looks_at}_{self._task.metric_name}", self._task.is_better
        self._best = None
        if better(score.metric, None) and all(better(score.metric, point[key]) for point in self.curve):
            found = {"step": step, "epoch": epoch, "metric": score.metric}
            tell_tensors(self._rank, self._gradients.portion)
            self._best = found

    def record(self, shards: Shards, step: int, now: float, train_loss: float, score: Score) -> None:
        """A point of the learning curve: the model after so many steps of all workers."""
        if self.curve and self.curve[-1]["step"] == step:
            return
        point = {
            "step": step,
            "epoch": step / shards.steps,
            "samples": shards.samples_until(step),
            "seconds": now,
            "train_loss": finite(train_loss),
            **score.named(self.looks_at),
        }
        self.curve.append(point)
        self._rank.tell("point", point, b"")
        if self._best is not None:
            self._rank.tell("best", self._best, b"")
            self._best = None

    def own_replica(self, values: Tensor) -> dict[str, Any]:
        """How far the workers' replicas are apart and, on request, how good this one is; all call it together."""
        apart = distance_from_mean(values, self._workers, self._gradients.portion)
        distance = {"consensus_distance": apart}
        if not self._of_each or apart == 0:
            return distance
        metric = self.own_metric(values)
        self._workers.barrier()
        return distance | {"own_metric": metric}

    def own_metric(self, values: Tensor) -> float | None:
        """How good a replica with these values is by itself, in the end."""
        with self._gradients.replica.holding(values):
            return finite(self._alone().metric)


def distance_from_mean(values: Tensor, workers: Comm, portion: Portion) -> float | None:
    """The root of the mean square distance of the workers' values from their mean; all call it together."""
    if workers.size == 1:
        return finite(0.0 * float(values.sum()))  # nothing, unless it has diverged
    mean = values.clone()
    workers.all_reduce(mean, "mean")
    square = portion.square(values - mean)
    workers.all_reduce(square, "mean")
    return finite(float(square.sqrt()))


def finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None


def mean_replica(replica: Replica, workers: Comm, x: Tensor, weight: float, mean_weight: float) -> Tensor:
    """The mean of the replicas, each with these parameters and this weight; all workers call it together."""
    if workers.size == 1 and x.data_ptr() == replica.x.data_ptr():
        return replica.values
    mean = replica.values.clone()
    mean[: x.numel()] = x
    if not math.isclose(weight, mean_weight, rel_tol=ALIKE):
        mean *= weight / mean_weight
    if workers.size > 1:
        workers.all_reduce(mean, "mean")
    return mean
