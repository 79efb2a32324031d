"""The learning rate over a run."""

from __future__ import annotations

import torch

from hocket.drivers.plan import Plan


class Rate:
    """Linear scaling, reached by a gradual warm-up (Goyal 2017), and decay from epoch to epoch."""

    def __init__(self, plan: Plan, optimizer: torch.optim.Optimizer, steps_per_epoch: int) -> None:
        self._optimizer, self._steps_per_epoch = optimizer, steps_per_epoch
        self._full = plan.lr * (plan.workers if plan.scale_lr else 1)
        self._start = plan.lr if plan.scale_lr else 0.0  # scaled rates rise from what one worker would have
        self._warmup_steps = plan.warmup * steps_per_epoch
        self._decay = plan.lr_decay
        self._now = 0.0
        self.set(1)

    def at(self, step: int) -> float:
        """The rate of the step with this number, counted from 1."""
        part = min(step / self._warmup_steps, 1.0) if self._warmup_steps else 1.0
        rate = self._start + part * (self._full - self._start)
        return rate * self._decay ** ((step - 1) // self._steps_per_epoch)

    def set(self, step: int) -> None:
        """Give the optimizer the rate of this step."""
        rate = self.at(step)
        if rate != self._now:
            self._now = rate
            for group in self._optimizer.param_groups:
                group["lr"] = rate
