"""The result of a run, as Python value and as JSON."""

from __future__ import annotations

import dataclasses
import platform
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Literal

import torch
from torch import Tensor

from hocket.version import __version__

Verdict = Literal["reached-target", "finished", "diverged", "crashed", "interrupted"]

TIMES = ("computing", "sending", "transferring", "waiting", "locks")
"""What a worker's seconds are made of."""
COMMUNICATION = ("communicating", "exposed")
"""How long data of a worker's travelled, and for how much of that it did nothing else."""


@dataclass(frozen=True)
class Result:
    """What a run came to. `state` holds the final model's tensors; everything else is in `result.json` too."""

    task: str
    strategy: str
    engine: str
    driver: str
    """Who took the steps: `compiled` workers, or `pytorch`."""
    workers: int
    seed: int
    verdict: Verdict
    seconds: float
    """Training alone, of the worker that took longest: evaluation is outside the clock."""
    virtual_seconds: float | None
    """Under `sim`: the simulated time, which the curve, the rate and the times of the workers are in."""
    samples_per_s: float | None
    """None in a run that diverged: what leads nowhere has no speed."""
    steps: int
    epochs: float
    train_loss: float | None
    test_loss: float | None
    metric: str
    """The one that counts; of several, the first."""
    test_metric: float | None
    target: float | None
    time_to_target: float | None
    bytes_sent: int
    staleness: dict[str, Any]
    per_worker: list[dict[str, float]]
    """Of each worker: its seconds, what they are made of (computing, sending, transferring, waiting for others and
    for locks), and bytes; with `own_metrics`, where the replicas differed before the last average, also the metric of
    its own (`own_metric`)."""
    consensus_distance: float | None
    """How far the replicas were from their mean before the last average: the root of the mean square distance."""
    curve: list[dict[str, Any]]
    parameters: int
    versions: dict[str, str]
    layout: str = ""
    """How each model was split over ranks; `workers` counts these, and `per_worker` has the first of each model."""
    time_to_loss: dict[str, float | None] = field(default_factory=dict)
    """When the training loss was at 75, 50, 10, 5 and 2.5 % of the initial one: the mean over some 2,048 samples of all
    workers together."""
    shared: dict[str, Any] | None = None
    """In shared memory: updates applied and dropped, failed tries, waits for locks, vectors alive at the peak."""
    pipeline: list[dict[str, float]] = field(default_factory=list)
    """Of each stage: `bubble`, the share of its steps in which it did not compute, and `in_flight`, the micro-batches
    that it had under way at the most."""
    per_server: list[dict[str, float]] = field(default_factory=list)
    """Of each server, beside the workers: its seconds, what they are made of, and bytes."""
    learnt: bool = True
    """Whether it came to anything: the test accuracy is above that of always giving the most frequent class; for
    another metric, the training loss is below its start."""
    startup_seconds: float | None = None
    """Real time from when the run was asked for until all ranks were ready for the first step; outside the clock."""
    compile_seconds: float | None = None
    """Of compiled workers; outside the clock."""
    words_per_s: float | None = None
    """Of a text: words read, also those that are left out of training."""
    diverged_at_step: int | None = None
    error: str | None = None
    """What went wrong, in a run that failed."""
    out: str | None = None
    lower_is_better: bool = False
    """Of the metric."""
    looks_at: str = "test"
    """What the curve, the target, the best model and tuning went by: `test` or `validation` samples."""
    metrics: dict[str, float | None] = field(default_factory=dict)
    """Every metric on the test samples, by name."""
    validation_loss: float | None = None
    validation_metrics: dict[str, float | None] = field(default_factory=dict)
    """On the validation samples, where there are any."""
    train_metrics: dict[str, float | None] = field(default_factory=dict)
    """On the training samples in the end, where that was asked for; `train_loss` is of the way there."""
    best: dict[str, Any] | None = None
    """The best point of the learning curve: its step, epoch and metric."""
    best_state: dict[str, Tensor] = field(default_factory=dict, repr=False)
    """The tensors of the model that the run had there."""
    state: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def to_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in recorded()}
        return by_name(values)

    @property
    def judged_metric(self) -> float | None:
        """The metric on the samples that the run went by."""
        return self.test_metric if self.looks_at == "test" else self.validation_metrics.get(self.metric)

    @property
    def judged_loss(self) -> float | None:
        return self.test_loss if self.looks_at == "test" else self.validation_loss

    @property
    def test_accuracy(self) -> float | None:
        """The test metric where it is called accuracy; None where it is something else, such as an error."""
        return self.test_metric if self.metric == "accuracy" else None


def recorded() -> list[str]:
    """What of a result is JSON."""
    return [f.name for f in dataclasses.fields(Result) if f.name not in ("state", "best_state")]


def by_name(values: dict[str, Any]) -> dict[str, Any]:
    """A record with every metric under its own name, such as test_accuracy."""
    found = dict(values)
    test = {found["metric"]: found.pop("test_metric")} | found.pop("metrics")
    measured = {"test": test, "validation": found.pop("validation_metrics"), "train": found.pop("train_metrics")}
    return found | {f"{on}_{name}": value for on, values in measured.items() for name, value in values.items()}


def staleness_summary(histogram: Counter[int]) -> dict[str, Any]:
    """Mean, maximum and histogram of the updates' staleness."""
    updates = sum(histogram.values())
    return {
        "mean": sum(tau * n for tau, n in histogram.items()) / updates if updates else 0.0,
        "max": max(histogram, default=0),
        "histogram": {str(tau): histogram[tau] for tau in sorted(histogram)},
    }


def versions() -> dict[str, str]:
    """Versions of everything that matters to a result."""
    import numpy

    found = {
        "hocket": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "processor": _processor(),
    }
    for package in ("mpi4py", "mpich", "numba"):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
