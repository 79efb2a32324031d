"""The training losses of workers that go in step, all at once; `Ledger` has those of one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hocket.measure.losses import ENTRIES


class LossesOfAll:
    """Keeps losses until somebody looks."""

    def __init__(self, workers: int) -> None:
        self._losses: list[Tensor] = []
        """A vector a step since the last look; left on the device: asking would wait."""
        self._about: list[tuple[Any, Any, int]] = []
        """Of each: the workers' samples and times, and its number."""
        self._sums = np.zeros((0, 3, workers))
        """As `History` has them of one worker: samples, and the sums over them of losses and times."""
        self._diverged = np.zeros(workers, dtype=np.int64)
        """The first step whose loss was not finite; 0 is none."""
        self.train_loss = math.nan

    def add(self, losses: Tensor, samples: Any, now_s: Any, step: int) -> None:
        self._losses.append(losses)
        self._about.append((samples, now_s, step))

    def look(self) -> tuple[float, bool]:
        """The mean loss since the last look, over all workers, and whether any was not finite."""
        if not self._losses:
            return self.train_loss, bool(self._diverged.any())
        losses = torch.stack(self._losses).double().cpu().numpy()
        samples, seconds, steps = (np.array(column) for column in zip(*self._about, strict=True))
        self._losses, self._about = [], []
        with np.errstate(invalid="ignore", over="ignore"):
            self._add(np.stack([samples, losses * samples, seconds * samples], 1))
            self.train_loss = float((losses * samples).sum() / samples.sum())
        bad = ~np.isfinite(losses)
        first = np.where(bad.any(0), steps[bad.argmax(0)], 0)
        self._diverged = np.where(self._diverged == 0, first, self._diverged)
        return self.train_loss, bool(bad.any())

    def _add(self, sums: Any) -> None:
        self._sums = np.concatenate([self._sums, sums])
        while len(self._sums) > ENTRIES:
            pairs = len(self._sums) // 2 * 2
            self._sums = np.concatenate([self._sums[:pairs:2] + self._sums[1:pairs:2], self._sums[pairs:]])

    def of(self, worker: int) -> list[list[float | None]]:
        """One worker's history, for its report: JSON has no infinity."""
        sums = self._sums[:, :, worker]
        entries: list[list[float | None]] = sums.tolist()
        if not np.isfinite(sums).all():
            entries = [[n if n is not None and math.isfinite(n) else None for n in entry] for entry in entries]
        return entries

    def diverged_at(self, worker: int) -> int | None:
        return int(self._diverged[worker]) or None
