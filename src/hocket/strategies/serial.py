"""One worker: what every other strategy is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hocket.core.errors import UserError
from hocket.core.sharing import Sharing
from hocket.core.worker import Steps, Strategy, Worker, strategy

MOST_THREADS = 1024


@strategy("serial")
@dataclass(frozen=True)
class Serial(Strategy):
    """One worker, no communication: the baseline. `threads` are PyTorch's own, inside an operation."""

    threads: int = 1
    most_workers: ClassVar[int] = 1

    def check(self, workers: int) -> None:
        if workers != 1:
            raise UserError(f"strategy serial runs 1 worker, got {workers}; use --workers 1, or --strategy allreduce")
        if not 1 <= self.threads <= MOST_THREADS:
            raise UserError(f"strategy serial: threads must be from 1 to {MOST_THREADS}, got {self.threads}")

    def compiled_sharing(
        self, dim: int, workers: int, *, sparse: bool = False, by_rows: bool = False
    ) -> Sharing | None:
        """Who is alone needs no lock. Compiled loops have one thread."""
        return Sharing("hogwild", dim, workers) if self.threads == 1 else None

    def worker(self, w: Worker) -> Steps:
        while (g := (yield)) is not None:
            w.descend(g)
