"""The learning rate over a run."""

from __future__ import annotations

import math
from typing import Any

import torch

from hocket.drivers.plan import Plan
from hocket.optim.schedules import Own, Rates, parse

RATES = 100
"""Rates of a run whose rate falls, where compiled workers take the steps: they hold one for a while."""


class Schedule:
    """Linear scaling, reached by a gradual warm-up (Goyal 2017), decay from epoch to epoch, a linear fall to 0, and
    one of PyTorch's schedules; their factors are multiplied."""

    def __init__(
        self, plan: Plan, optimizer: torch.optim.Optimizer, steps_per_epoch: int, own: Own | None = None
    ) -> None:
        self._optimizer, self._steps_per_epoch = optimizer, steps_per_epoch
        self._full = plan.lr * (plan.workers if plan.scale_lr else 1)
        self._start = plan.lr if plan.scale_lr else 0.0  # scaled rates rise from what one worker would have
        self._warmup_steps = plan.warmup * steps_per_epoch
        self._decay = plan.lr_decay
        self._rates = rates_of(plan, steps_per_epoch, own)
        self._changes = bool(plan.lr_falls or self._warmup_steps or self._rates) or plan.lr_decay != 1
        self._now: dict[str, Any] = {}
        self._falls_over = plan.steps if plan.lr_falls else math.inf
        self.held = max(plan.steps // RATES, 1) if plan.lr_falls else plan.steps
        """Steps that compiled workers take at one rate, at most."""
        self.set(1)

    def at(self, step: int) -> float:
        """The rate of the step with this number, counted from 1."""
        rate: float = self._all_at(step)["lr"]
        return rate

    def _all_at(self, step: int) -> dict[str, Any]:
        part = min(step / self._warmup_steps, 1.0) if self._warmup_steps else 1.0
        rate = self._start + part * (self._full - self._start)
        epoch = (step - 1) // self._steps_per_epoch
        rate *= self._decay**epoch * max(1 - (step - 0.5) / self._falls_over, 0.0)  # a run may be made longer
        if self._rates is None:
            return {"lr": rate}
        found = self._rates.at(step - 1 if self._rates.per_step else epoch)
        return found | {"lr": rate * found["lr"] / self._full}

    def set(self, step: int) -> float:
        """Give the optimizer the rate of this step, which is returned."""
        if self._changes or not self._now:
            now = self._all_at(step)
            if now != self._now:
                self._now = now
                for group in self._optimizer.param_groups:
                    group.update(now)
        rate: float = self._now["lr"]
        return rate


def rates_of(plan: Plan, steps_per_epoch: int, own: Own | None) -> Rates | None:
    """What the plan's schedule makes of its full rate; None without one."""
    if not plan.schedule:
        return None
    full = plan.lr * (plan.workers if plan.scale_lr else 1)
    *_, per_step = parse(plan.schedule)
    length = plan.steps if per_step else -(-plan.steps // steps_per_epoch)
    return Rates(plan.schedule, plan.optimizer, full, plan.momentum, length, own)
