"""How good a model is: evaluation of replicas by all workers together, outside the clock."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hocket.core.comm import Comm, Rank
from hocket.core.replica import Replica
from hocket.tasks import SampleSet, Task

INITIAL_SAMPLES = 2048
"""Training samples that the loss before the first step is taken over."""


class Judge:
    """Evaluates replicas and keeps the learning curve. All workers call its methods together."""

    def __init__(self, rank: Rank, workers: Comm, task: Task, model: Replica, train: SampleSet, test: SampleSet):
        self._rank, self._workers, self._task, self._model = rank, workers, task, model
        self._train, self._test = train, test
        self.curve: list[dict[str, Any]] = []

    def initial_loss(self) -> float:
        """The training loss of the model as it is."""
        chosen = torch.arange(min(INITIAL_SAMPLES, len(self._train)))
        sums = self._sums(self._train, chosen[self._workers.rank :: self._workers.size])
        self._workers.all_reduce(sums)
        return float(sums[0]) / len(chosen)

    def evaluate(self, replica: Tensor) -> tuple[float, float]:
        """Mean loss and metric of `replica` on the test samples, of which each rank takes a share."""
        own = self._model.replica
        saved = own.clone()
        own.copy_(replica)
        sums = self._sums(self._test, torch.arange(len(self._test))[self._workers.rank :: self._workers.size])
        own.copy_(saved)
        self._workers.all_reduce(sums)
        test_loss, metric = (sums / len(self._test)).tolist()
        return test_loss, metric

    def record(self, step: int, epoch: float, now: float, train_loss: float, test_loss: float, metric: float) -> None:
        """A point of the learning curve."""
        if self.curve and self.curve[-1]["step"] == step:
            return
        point = {
            "step": step,
            "epoch": epoch,
            "seconds": now,
            "train_loss": finite(train_loss),
            "test_loss": finite(test_loss),
            f"test_{self._task.metric_name}": finite(metric),
        }
        self.curve.append(point)
        if self._rank.comm.rank == 0:
            self._rank.tell("point", point, b"")

    def mean_replica(self) -> Tensor:
        """The mean of the replicas."""
        mean = self._model.replica.clone()
        if self._workers.size > 1:
            self._workers.all_reduce(mean, "mean")
        return mean

    def own_replica(self, replica: Tensor) -> dict[str, Any]:
        """How far the workers' replicas are apart, and how good this one is by itself."""
        saved = self._model.replica.clone()
        self._model.replica.copy_(replica)
        found = self._own_replica()
        self._model.replica.copy_(saved)
        return found

    def _own_replica(self) -> dict[str, Any]:
        apart = self._model.replica - self.mean_replica()
        square = apart.double().square().sum().reshape(1).cpu()
        self._workers.all_reduce(square, "mean")
        if not square > 0:
            return {"consensus_distance": 0.0}
        metric = float(self._sums(self._test, torch.arange(len(self._test)))[1]) / len(self._test)
        self._workers.barrier()
        return {"consensus_distance": finite(float(square.sqrt())), "own_metric": finite(metric)}

    def _sums(self, samples: SampleSet, chosen: Tensor) -> Tensor:
        """Sums of loss and metric of this rank's model over some samples."""
        module, device = self._model.model, self._model.x.device
        sums = torch.zeros(2, dtype=torch.float64)
        module.eval()
        with torch.no_grad():
            for index in torch.split(chosen, 2048):
                if len(index):
                    inputs, targets = samples.take(index)
                    output, targets = module(inputs.to(device)), targets.to(device)
                    sums[0] += float(self._task.loss(output, targets)) * len(index)
                    sums[1] += float(self._task.metric(output, targets)) * len(index)
        module.train()
        return sums


def finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None
