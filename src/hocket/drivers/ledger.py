"""The training losses of one worker, as they come in: their means, when they fell, and whether they blew up."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from hocket.core.comm import Comm
from hocket.core.state import refill
from hocket.measure.losses import Losses, Milestones


class Ledger:
    """Keeps losses until somebody looks."""

    def __init__(self) -> None:
        self._entries: list[tuple[Tensor, int, float, int]] = []
        """Loss, samples, time and number of each step since the last look; left on the device: asking would wait."""
        self._carried = Losses.of([])
        self.milestones = Milestones(1.0)
        self.diverged_at: int | None = None
        self.train_loss = math.nan
        self._blown_up = 0.0  # losses that were not finite, in epochs that are closed
        self.by_epoch: dict[int, list[float]] = {}
        """Where workers do not meet: this one's sum of losses, samples, and losses that are not finite."""

    def add(self, loss: Tensor, samples: int, now_s: float, step: int) -> None:
        self._entries.append((loss, samples, now_s, step))

    def add_all(self, losses: Losses) -> None:
        self._carried = self._carried.then(losses)

    def _take(self) -> Losses:
        entries, self._entries = self._entries, []
        taken, self._carried = self._carried.then(Losses.of(entries)), Losses.of([])
        self.milestones.see(taken)
        if self.diverged_at is None:
            self.diverged_at = taken.diverged_at()
        return taken

    def mean(self, workers: Comm) -> tuple[float, bool]:
        """The mean loss since the last look, over all workers, and whether any loss was not finite."""
        sums = self._take().sums()
        sums[2] += self._blown_up
        workers.all_reduce(sums)
        if sums[1]:
            self.train_loss = float(sums[0] / sums[1])
        return self.train_loss, bool(sums[2])

    def close(self, epoch: int) -> float:
        """Put the losses of an epoch by; returns this worker's mean."""
        sums = self._take().sums().tolist()
        self.by_epoch[epoch] = sums
        self._blown_up += sums[2]
        if sums[1]:
            self.train_loss = sums[0] / sums[1]
        return self.train_loss

    def state(self) -> dict[str, Any]:
        entries, self._entries = self._entries, []
        self._carried = self._carried.then(Losses.of(entries))
        return {
            "losses": self._carried.columns(),
            "milestones": self.milestones,
            "diverged_at": self.diverged_at,
            "train_loss": self.train_loss,
            "by_epoch": self.by_epoch,
            "blown_up": self._blown_up,
        }

    def load_state(self, saved: dict[str, Any]) -> None:
        self._carried = Losses(*saved["losses"])
        refill(self.milestones, saved["milestones"])
        self.diverged_at, self.train_loss = saved["diverged_at"], saved["train_loss"]
        self.by_epoch, self._blown_up = saved["by_epoch"], saved["blown_up"]
