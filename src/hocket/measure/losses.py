"""Training losses of one worker: their mean over an epoch, and when they fell below parts of the first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hocket.core.state import State

PARTS = (75.0, 50.0, 10.0, 5.0, 2.5)
"""Percent of the initial loss whose times are measured."""
WINDOW = 2048
"""Samples that the running mean of the loss goes back over, more or less."""


@dataclass(frozen=True)
class Losses:
    """One entry a gradient: the batch's mean loss, its samples, its time, and the number of its step."""

    values: Tensor
    samples: Tensor
    seconds: Tensor
    steps: Tensor

    @classmethod
    def of(cls, entries: Sequence[tuple[Tensor, int, float, int]]) -> Losses:
        """From what a loop has put by; the losses may still lie on the device."""
        losses = [loss for loss, *_ in entries]
        rest = torch.tensor([numbers for _, *numbers in entries], dtype=torch.float64).view(-1, 3)
        values = torch.stack(losses).double().cpu() if losses else torch.zeros(0, dtype=torch.float64)
        return cls(values, *rest.T)

    def columns(self) -> list[Tensor]:
        return [self.values, self.samples, self.seconds, self.steps]

    def then(self, later: Losses) -> Losses:
        """These, and later ones behind them."""
        pairs = zip(self.columns(), later.columns(), strict=True)
        return Losses(*(torch.cat([a.double(), b.double()]) for a, b in pairs))

    def sums(self) -> Tensor:
        """Sum of the samples' losses, number of samples, number of losses that are not finite: add up over workers."""
        bad = (~torch.isfinite(self.values)).sum().double()
        return torch.stack([self.values @ self.samples, self.samples.sum(), bad])

    def diverged_at(self) -> int | None:
        """The first step whose loss is not finite."""
        bad = torch.nonzero(~torch.isfinite(self.values))
        return int(self.steps[bad[0]]) if len(bad) else None


class Milestones(State):
    """When the running mean of the loss first was at or below each part of the initial loss."""

    seconds: dict[float, float]

    def __init__(self, initial: float) -> None:
        super().__init__(initial=initial, mean=initial, seconds={})

    def start(self, initial: float) -> None:
        """The loss before the first step is known now."""
        self.initial = self.mean = initial

    def see(self, losses: Losses) -> None:
        parts = [p for p in PARTS if p not in self.seconds]
        for loss, samples, now in zip(
            losses.values.tolist(), losses.samples.tolist(), losses.seconds.tolist(), strict=True
        ):
            if not parts:
                return
            self.mean += (1 - math.exp(-samples / WINDOW)) * (loss - self.mean)
            while parts and self.mean <= self.initial * parts[0] / 100:
                self.seconds[parts.pop(0)] = now
