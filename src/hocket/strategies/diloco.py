"""DiLoCo: local steps of any optimizer, then one outer step along what they changed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hocket.core.errors import UserError
from hocket.core.state import State
from hocket.core.weight import Weight
from hocket.core.worker import Need, Steps, Strategy, Worker, strategy


@strategy("diloco")
@dataclass(frozen=True)
class DiLoCo(Strategy):
    """Local steps, then an outer step of Nesterov momentum along the mean change (Douillard 2023, algorithm 1)."""

    every: int = 16
    """Local steps between outer steps; the paper has 500, for runs of many thousands."""
    lr: float = 0.7
    """Of the outer optimizer."""
    momentum: float = 0.9
    """Nesterov's, of the outer optimizer; the inner optimizer's state stays with its worker."""

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"collectives"})

    def check(self, workers: int) -> None:
        if self.every < 1:
            raise UserError(f"diloco: every must be 1 or more, got {self.every}")
        if self.lr <= 0:
            raise UserError(f"diloco: lr must be greater than 0, got {self.lr:g}")
        if not 0 <= self.momentum < 1:
            raise UserError(f"diloco: momentum must be at least 0 and less than 1, got {self.momentum:g}")

    def step_scale(self, workers: int) -> float:
        return self.lr / (1 - self.momentum) / workers

    def part(self, w: Worker) -> tuple[Tensor, float]:
        return w.x, w.kept("seen").since.samples or 1.0

    def worker(self, w: Worker) -> Steps:
        anchor = w.keep("anchor", w.x.clone())  # the model that all workers set out from
        velocity = w.keep("velocity", torch.zeros_like(anchor))
        seen = w.keep("seen", State(since=Weight()))  # the samples since the last outer step
        while (g := (yield)) is not None:
            w.descend(g)
            seen.since += g.weight
            if w.step % self.every == 0:
                w.average_replicas(seen.since, since=anchor)
                seen.since = Weight()
                change = anchor - w.x  # old minus new: an outer gradient, to be descended
                velocity.mul_(self.momentum).add_(change)
                anchor.add_(change + self.momentum * velocity, alpha=-self.lr)
                w.x.copy_(anchor)
        if w.step % self.every != 0:  # the farewell: everyone leaves with one model
            w.average_replicas(seen.since)
