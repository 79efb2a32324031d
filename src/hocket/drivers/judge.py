"""How good a model is: evaluation outside the clock, by all workers together or by one alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hocket.core.comm import Comm, Rank
from hocket.core.shard import Shards
from hocket.drivers.gradients import Gradients
from hocket.tasks import SampleSet, Task

SHARE = 1024
"""Samples that are not worth sharing out: a forward pass has costs of its own."""


class Judge:
    """Evaluates replicas and keeps the learning curve."""

    def __init__(
        self,
        rank: Rank,
        workers: Comm,
        gradients: Gradients,
        task: Task,
        train: SampleSet,
        test: SampleSet,
        *,
        of_each: bool,
    ) -> None:
        self._rank, self._workers, self._gradients, self._metric = rank, workers, gradients, task.metric_name
        self._train, self._test, self._glance, self._of_each = train, test, task.glance, of_each
        self.curve: list[dict[str, Any]] = []

    def initial_loss(self) -> float:
        """The training loss of the model as it is; all workers call it together."""
        chosen = min(self._glance, len(self._train))
        sums = self._gradients.evaluate(self._train, self._share(chosen))
        self._workers.all_reduce(sums)
        return float(sums[0]) / chosen

    def _share(self, samples: int) -> Tensor:
        """Which of the first samples this worker looks at; of few, the first workers look at all."""
        size = max(SHARE, -(-samples // self._workers.size))
        return torch.arange(samples)[self._workers.rank * size : (self._workers.rank + 1) * size]

    def together(self, values: Tensor) -> tuple[float, float]:
        """Mean test loss and metric of a replica with these values; each worker takes a share of the samples."""
        with self._holding(values):
            sums = self._gradients.evaluate(self._test, self._share(len(self._test)))
        self._workers.all_reduce(sums)
        test_loss, metric = (sums / len(self._test)).tolist()
        return test_loss, metric

    def alone(self, x: Tensor) -> tuple[float, float]:
        """The same by this worker alone, while the others go on; `x` may be the parameters without buffers."""
        with self._holding(x):
            sums = self._gradients.evaluate(self._test, torch.arange(len(self._test)))
        test_loss, metric = (sums / len(self._test)).tolist()
        return test_loss, metric

    @contextmanager
    def _holding(self, values: Tensor) -> Iterator[None]:
        """Inside, the replica has these values, of the parameters or of all."""
        own = self._gradients.replica.values[: values.numel()]
        saved = own.clone()
        own.copy_(values)
        try:
            yield
        finally:
            own.copy_(saved)

    def record(self, shards: Shards, step: int, now: float, train_loss: float, test_loss: float, metric: float) -> None:
        """A point of the learning curve: the model after so many steps of all workers."""
        if self.curve and self.curve[-1]["step"] == step:
            return
        point = {
            "step": step,
            "epoch": step / shards.steps,
            "samples": shards.samples_until(step),
            "seconds": now,
            "train_loss": finite(train_loss),
            "test_loss": finite(test_loss),
            f"test_{self._metric}": finite(metric),
        }
        self.curve.append(point)
        self._rank.tell("point", point, b"")

    def mean_replica(self, x: Tensor, weight: float) -> Tensor:
        """The mean of the replicas, each with these parameters and this weight; all workers call it together."""
        mean = self._gradients.replica.values.clone()
        mean[: x.numel()] = x
        weights = torch.zeros(self._workers.size, dtype=torch.float64)
        self._workers.all_gather(weights, torch.tensor([weight], dtype=torch.float64))
        if weights.min() < weights.max():
            mean *= weight / float(weights.mean())
        if self._workers.size > 1:
            self._workers.all_reduce(mean, "mean")
        return mean

    def own_replica(self, values: Tensor) -> dict[str, Any]:
        """How far the workers' replicas are apart and, on request, how good this one is; all call it together."""
        mean = values.clone()
        if self._workers.size > 1:
            self._workers.all_reduce(mean, "mean")
        square = (values - mean).double().square().sum().reshape(1).cpu()
        self._workers.all_reduce(square, "mean")
        distance = {"consensus_distance": finite(float(square.sqrt()))}
        if not self._of_each or not square > 0:
            return distance
        _, metric = self.alone(values)
        self._workers.barrier()
        return distance | {"own_metric": finite(metric)}


def finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None
