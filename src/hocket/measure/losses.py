"""Training losses: their mean over a stretch of a run, and when they fell below parts of the first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PARTS = (75.0, 50.0, 10.0, 5.0, 2.5)
"""Percent of the initial loss whose times are measured."""
WINDOW = 2048
"""Samples, of all workers together, that a mean loss is taken over."""
LEAST = 512
"""And at least so many near the beginning and the end of a run, where it cannot reach as far on both sides."""
ENTRIES = 4096
"""What a worker remembers of its losses, at most: in a longer run, one entry stands for several batches."""


Loss = Tensor | float
"""A batch's mean loss: still on its device, where asking would wait for it, or a number."""


@dataclass(frozen=True)
class Losses:
    """One entry a gradient: the batch's mean loss, its samples, its time, and the number of its step."""

    values: Tensor
    samples: Tensor
    seconds: Tensor
    steps: Tensor

    @classmethod
    def of(cls, entries: Sequence[tuple[Loss, int, float, int]]) -> Losses:
        """From what a loop has put by."""
        if not entries:
            return cls(*torch.zeros(4, 0, dtype=torch.float64))
        losses, *numbers = zip(*entries, strict=True)
        if isinstance(losses[0], Tensor):
            values = torch.stack(losses).double().cpu()
        else:
            values = torch.tensor(losses, dtype=torch.float64)
        return cls(values, *torch.tensor(numbers, dtype=torch.float64))

    def columns(self) -> list[Tensor]:
        return [self.values, self.samples, self.seconds, self.steps]

    def then(self, later: Losses) -> Losses:
        """These, and later ones behind them."""
        pairs = zip(self.columns(), later.columns(), strict=True)
        return Losses(*(torch.cat([a.double(), b.double()]) for a, b in pairs))

    def rows(self) -> Tensor:
        """A row an entry: samples, and the sums over them of their losses and times."""
        n = self.samples
        return torch.stack([n, self.values * n, self.seconds * n], 1)

    def bad(self) -> int:
        """How many are not finite."""
        return int((~torch.isfinite(self.values)).sum())

    def diverged_at(self) -> int | None:
        """The first step whose loss is not finite."""
        bad = torch.nonzero(~torch.isfinite(self.values))
        return int(self.steps[bad[0]]) if len(bad) else None


class History:
    """The losses of one worker over a whole run, in a few thousand entries."""

    def __init__(self) -> None:
        self.sums = torch.zeros(0, 3, dtype=torch.float64)
        """A row an entry, as `Losses.rows` has them."""

    def add(self, rows: Tensor) -> None:
        self.sums = torch.cat([self.sums, rows])
        while len(self.sums) > ENTRIES:
            pairs = len(self.sums) // 2 * 2
            self.sums = torch.cat([self.sums[:pairs:2] + self.sums[1:pairs:2], self.sums[pairs:]])


def time_to_loss(initial: float, histories: Sequence[Tensor]) -> dict[float, float]:
    """From the sums of the workers' histories: when the loss was first at or below each part of the initial one.

    The losses of all workers stand in one row, in the order of their times. The loss at a time is the mean over the
    window around it, and the time that of the window's samples in the mean: so a window is not late by half its length.
    """
    row = torch.cat([h.view(-1, 3) for h in histories])
    row = row[row[:, 0] > 0]
    row = row[torch.argsort(row[:, 2] / row[:, 0], stable=True)]
    if len(bad := torch.nonzero(~torch.isfinite(row[:, 1]))):
        row = row[: int(bad[0])]
    if not math.isfinite(initial) or not len(row):
        return {}
    total = torch.cat([row.new_zeros(1, 3), row.cumsum(0)])
    end = total[-1, 0]
    middle = (total[:-1, 0] + total[1:, 0]) / 2
    half = torch.minimum(torch.minimum(middle, end - middle), end.new_tensor(WINDOW / 2))
    judged = half >= min(LEAST, float(end) / 2) / 2
    borders = total[:, 0].contiguous()
    first = torch.searchsorted(borders, (middle - half)[judged], right=True) - 1
    behind = torch.searchsorted(borders, (middle + half)[judged])
    samples, losses, times = (total[behind] - total[first]).T
    found: dict[float, float] = {}
    for part in PARTS:
        reached = torch.nonzero(losses / samples <= initial * part / 100)
        if len(reached):
            found[part] = float((times / samples)[reached[0]])
    return found
