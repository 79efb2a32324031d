"""The training losses of one worker, as they come in: their means, their history, and whether they blew up."""

from __future__ import annotations

import math
from typing import Any

from hocket.core.comm import Comm
from hocket.measure.losses import History, Loss, Losses


class Ledger:
    """Keeps losses until somebody looks."""

    def __init__(self) -> None:
        self._entries: list[tuple[Loss, int, float, int]] = []
        """Loss, samples, time and number of each step since the last look."""
        self._carried = Losses.of([])
        self.initial_loss = math.nan
        self.history = History()
        self.diverged_at: int | None = None
        self.train_loss = math.nan
        self._blown_up = 0.0  # losses that were not finite, in stretches that are closed
        self.by_stretch: dict[int, list[float]] = {}
        """Where workers do not meet: this one's sum of losses, samples, and losses that are not finite, between two
        looks at the model."""

    def add(self, loss: Loss, samples: int, now_s: float, step: int) -> None:
        self._entries.append((loss, samples, now_s, step))

    def add_all(self, losses: Losses) -> None:
        self._carried = self._carried.then(losses)

    def _take(self) -> Losses:
        entries, self._entries = self._entries, []
        taken, self._carried = self._carried.then(Losses.of(entries)), Losses.of([])
        self.history.add(taken)
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

    def close(self, stretch: int) -> float:
        """Put the losses of a stretch by; returns this worker's mean."""
        sums = self._take().sums().tolist()
        self.by_stretch[stretch] = sums
        self._blown_up += sums[2]
        if sums[1]:
            self.train_loss = sums[0] / sums[1]
        return self.train_loss

    def state(self) -> dict[str, Any]:
        entries, self._entries = self._entries, []
        self._carried = self._carried.then(Losses.of(entries))
        return {
            "losses": self._carried.columns(),
            "history": self.history.sums,
            "initial_loss": self.initial_loss,
            "diverged_at": self.diverged_at,
            "train_loss": self.train_loss,
            "by_stretch": self.by_stretch,
            "blown_up": self._blown_up,
        }

    def load_state(self, saved: dict[str, Any]) -> None:
        self._carried, self.history.sums = Losses(*saved["losses"]), saved["history"]
        self.initial_loss = saved["initial_loss"]
        self.diverged_at, self.train_loss = saved["diverged_at"], saved["train_loss"]
        self.by_stretch, self._blown_up = saved["by_stretch"], saved["blown_up"]
