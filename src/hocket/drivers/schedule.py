"""The learning rate over a run."""

from __future__ import annotations

import math

import torch

from hocket.drivers.plan import Plan

RATES = 100
"""Rates of a run whose rate falls, where compiled workers take the steps: they hold one for a while."""


class Schedule:
    """Linear scaling, reached by a gradual warm-up (Goyal 2017), and decay from epoch to epoch, or linear to 0."""

    def __init__(self, plan: Plan, optimizer: torch.optim.Optimizer, steps_per_epoch: int) -> None:
        self._optimizer, self._steps_per_epoch = optimizer, steps_per_epoch
        self._full = plan.lr * (plan.workers if plan.scale_lr else 1)
        self._start = plan.lr if plan.scale_lr else 0.0  # scaled rates rise from what one worker would have
        self._warmup_steps = plan.warmup * steps_per_epoch
        self._decay = plan.lr_decay
        self._falls_over = plan.steps if plan.lr_falls else math.inf
        self.held = max(plan.steps // RATES, 1) if plan.lr_falls else plan.steps
        """Steps that compiled workers take at one rate, at most."""
        self._now = 0.0
        self.set(1)

    def at(self, step: int) -> float:
        """The rate of the step with this number, counted from 1."""
        part = min(step / self._warmup_steps, 1.0) if self._warmup_steps else 1.0
        rate = self._start + part * (self._full - self._start)
        left = max(1 - (step - 0.5) / self._falls_over, 0.0)  # a run may be made longer
        return rate * left * self._decay ** ((step - 1) // self._steps_per_epoch)

    def set(self, step: int) -> None:
        """Give the optimizer the rate of this step."""
        rate = self.at(step)
        if rate != self._now:
            self._now = rate
            for group in self._optimizer.param_groups:
                group["lr"] = rate
