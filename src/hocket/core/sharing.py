"""One parameter vector that many workers see, and how they share it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from hocket.core.errors import UserError
from hocket.core.staleness import Handling, needs_the_read, needs_the_squares

Method = Literal["mutex", "rwlock", "hogwild", "leashed"]
Backoff = Literal["none", "constant", "exponential", "yield"]

MOST = 1_000_000_000
"""Of what is counted in batches or attempts: more is a mistake."""
SMALLEST_LR = 1e-12
"""A step is a gradient times the learning rate; below this one it is taken for the gradient itself."""
MAX_WORKERS = 32_766
"""Two slots for each worker and one more have a number of 16 bits."""


@dataclass(frozen=True)
class Sharing:
    """How a vector of `dim` parameters is shared."""

    method: Method
    dim: int
    workers: int
    persistence: int | None = None
    """Leashed: failed attempts that an update may have before it is dropped. None: any number."""
    backoff: Backoff = "none"
    backoff_s: float = 1e-6
    backoff_max_s: float = 1e-3
    handling: Handling = "none"
    every: int = 1
    """Batches that a worker takes on a copy of its own before it writes what they changed."""
    by_rows: bool = False
    """Compiled workers of a sparse linear model tell each other what each row of a batch adds, and each adds it to a
    copy of its own (hogwild, every batch by itself, untempered)."""
    deadline_s: float = 10.0
    """The longest wait for a lock; then the run ends."""

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MAX_WORKERS:
            raise UserError(f"{self.method} takes 1 to {MAX_WORKERS} workers, got {self.workers}")
        if self.persistence is not None and not 0 <= self.persistence <= MOST:
            raise UserError(f"persistence must be from 0 to {MOST}, or inf; got {self.persistence}")
        if not 1 <= self.every <= MOST:
            raise UserError(f"{self.method}: every must be from 1 to {MOST}, got {self.every}")
        assert not self.by_rows or self.every == 1
        if not 0 < self.backoff_s <= self.backoff_max_s < 1:
            raise UserError("a backoff lasts more than 0 s, at most its maximum, and that is below 1 s")

    @property
    def slots(self) -> int:
        """Rows that may hold the current parameters."""
        return 2 * self.workers + 1 if self.method == "leashed" else 1

    @property
    def copies(self) -> int:
        """Rows that hold what a worker has read, where the method or the handling of staleness needs them."""
        needed = self.method in ("mutex", "rwlock") or needs_the_read(self.handling)
        return self.workers if needed else 0

    @property
    def squares(self) -> int:
        """Rows that hold the mean squares of a worker's gradients, where the handling of staleness needs them."""
        return self.workers if needs_the_squares(self.handling) else 0

    @property
    def rows(self) -> int:
        """All rows."""
        return self.slots + self.copies + self.squares

    @property
    def vectors(self) -> int:
        """The most vectors that can be alive: the rows, a gradient a worker, and its copies (two with `every`)."""
        return self.rows + self.workers * (3 if self.every > 1 else 2 if self.by_rows else 1)


@dataclass(frozen=True)
class Statistics:
    """What happened to a shared vector, over all workers."""

    updates: int
    dropped: int
    staleness: Counter[int]
    """Of applied updates. On real engines the last bin, 255, counts all beyond too."""
    tries: Counter[int]
    """Failed compare-and-swaps an update (leashed). On real engines the last bin, 63, counts all beyond too."""
    lock_wait_s: float
    """Blocked for a lock; in leashed from an update's first failed attempt to its end."""
    peak_vectors: int
    recovered: int = 0
    """Locks taken over from a worker that died; the vector may hold half of its update."""
    broken: int = 0
    """Waits that ended at the deadline."""
    lost: float = 0.0
    """The share of updates that others wrote over, at a parameter that every update writes (hogwild)."""


class SharedVector(Protocol):
    """The shared vector as one worker sees it."""

    def read(self, out: Tensor) -> int:
        """Copy the parameters that the worker's next gradient is computed at; returns their version."""

    def publish(self, g: Tensor, lr: float) -> bool:
        """Descend by lr * g, tempered by its staleness since this worker's last read; False if it was dropped."""

    def snapshot(self, out: Tensor) -> None:
        """Copy the parameters as they are, for a look at them; one worker at a time."""

    def lock_wait_s(self) -> float:
        """This worker's share of `Statistics.lock_wait_s`."""

    def statistics(self) -> Statistics: ...

    def state(self) -> dict[str, Any]:
        """What this worker must save for the vector to be taken up again; worker 0 speaks for what all share.

        For a meeting of all workers, while nobody reads or publishes.
        """

    def load_state(self, saved: dict[str, Any]) -> None:
        """Go on from what this worker saved, at a meeting of all workers over a vector that is shared alike."""
