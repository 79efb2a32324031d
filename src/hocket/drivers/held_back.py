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
_divided: WeakKeyDictionary[SampleSet, tuple[float, int, SampleSet | None, SampleSet | None]] = WeakKeyDictionary()
"""By all samples: the share, the seed, and both parts. The first is None where it is all: samples that this held would
never go."""


def held_back(plan: Plan, task: Task, train: SampleSet) -> Parts:
    """What is trained on, and what is judged meanwhile, if not the test samples: a share of `train`, drawn by the seed,
    or what the task brings. Ranks that are threads share it."""
    with _dividing:
        share, seed, trained, judged = _divided.get(train, (-1.0, -1, None, None))
        if (share, seed) != (plan.validation, plan.seed):
            trained, judged = _divide(plan, task, train)
            _divided[train] = plan.validation, plan.seed, trained, judged
        return train if trained is None else trained, judged


def _divide(plan: Plan, task: Task, train: SampleSet) -> tuple[SampleSet | None, SampleSet | None]:
    if plan.validation:
        count = validation_samples(plan.validation, len(train))
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(stream(plan.seed, "validation")))
        return train.part(order[count:].sort().values), train.part(order[:count].sort().values)
    if task.validation is None or isinstance(task.validation, (int, float)):
        return None, None
    return None, SampleSet(task.validation() if callable(task.validation) else task.validation, "validation")


def validation_samples(share: float, samples: int) -> int:
    """How many of so many samples are kept back: one at least."""
    return max(round(share * samples), 1) if share else 0
