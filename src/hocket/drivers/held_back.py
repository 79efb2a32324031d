"""Samples that are kept back from training, to be judged while it goes on."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

import torch

from hocket.core.seeds import stream
from hocket.drivers.plan import Plan
from hocket.tasks import SampleSet, Task

Parts = tuple[SampleSet, SampleSet | None]
_dividing = threading.Lock()
_divided: WeakKeyDictionary[SampleSet, tuple[float, int, Parts]] = WeakKeyDictionary()


def held_back(plan: Plan, task: Task, train: SampleSet) -> Parts:
    """What is trained on, and what is judged meanwhile, if not the test samples: a share of `train`, drawn by the seed,
    or what the task brings. Ranks that are threads share it."""
    with _dividing:
        share, seed, parts = _divided.get(train, (-1.0, -1, (train, None)))
        if (share, seed) != (plan.validation, plan.seed):
            parts = _divide(plan, task, train)
            _divided[train] = plan.validation, plan.seed, parts
        return parts


def _divide(plan: Plan, task: Task, train: SampleSet) -> Parts:
    if plan.validation:
        count = validation_samples(plan.validation, len(train))
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(stream(plan.seed, "validation")))
        return train.part(order[count:].sort().values), train.part(order[:count].sort().values)
    if task.validation is None or isinstance(task.validation, (int, float)):
        return train, None
    return train, SampleSet(task.validation() if callable(task.validation) else task.validation, "validation")


def validation_samples(share: float, samples: int) -> int:
    """How many of so many samples are kept back: one at least."""
    return max(round(share * samples), 1) if share else 0
