"""The training losses of one worker, as they come in: their means, their history, and whether they blew up."""

from __future__ import annotations

import math
from typing import Any

from hocket.measure.losses import History, Loss, Losses


class Ledger:
    """Keeps losses until somebody looks."""

    def __init__(self) -> None:
        self._entries: list[tuple[Loss, int, float, int]] = []
        """Loss, samples, time and number of each step since the last look."""
        self._carried: Losses | None = None
        """Losses that come before these."""
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
        self._carried = losses if self._carried is None else self._carried.then(losses)

    def _all_so_far(self) -> Losses:
        entries, self._entries = self._entries, []
        newest = Losses.of(entries)
        return newest if self._carried is None else self._carried.then(newest)

    def put_by(self) -> list[float]:
        """Put the losses since the last look by. Returns the sum of the samples' losses, the number of samples, and how
        many losses were not finite until now: what adds up over workers."""
        sums = self._put_by()
        return [*sums[:2], sums[2] + self._blown_up]

    def _put_by(self) -> list[float]:
        taken, self._carried = self._all_so_far(), None
        rows = taken.rows()
        self.history.add(rows)
        samples, loss, _ = rows.sum(0).tolist()
        bad = 0 if math.isfinite(loss) else taken.bad()
        if bad and self.diverged_at is None:
            self.diverged_at = taken.diverged_at()
        return [loss, samples, bad]

    def mean(self, loss: float, samples: float) -> float:
        """The mean loss since the last look, over all workers, of whom this is what `put_by` gave; if it gave any."""
        if samples:
            self.train_loss = loss / samples
        return self.train_loss

    def close(self, stretch: int) -> float:
        """Put the losses of a stretch by; returns this worker's mean."""
        sums = self._put_by()
        self.by_stretch[stretch] = sums
        self._blown_up += sums[2]
        return self.mean(*sums[:2])

    def state(self) -> dict[str, Any]:
        self._carried = self._all_so_far()
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
