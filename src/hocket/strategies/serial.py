"""One worker: what every other strategy is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hocket.core.errors import UserError
from hocket.core.sharing import Sharing
from hocket.core.worker import Steps, Strategy, Worker, strategy


@strategy("serial")
@dataclass(frozen=True)
class Serial(Strategy):
    """One worker, no communication: the baseline."""

    most_workers: ClassVar[int] = 1

    def check(self, workers: int) -> None:
        if workers != 1:
            raise UserError(f"strategy serial runs 1 worker, got {workers}; use --workers 1, or --strategy allreduce")

    def compiled_sharing(self, dim: int, workers: int, *, sparse: bool = False) -> Sharing:
        """Who is alone needs no lock."""
        return Sharing("hogwild", dim, workers)

    def worker(self, w: Worker) -> Steps:
        while (g := (yield)) is not None:
            w.descend(g)
