"""Local SGD: replicas step on their own and are averaged now and then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from hocket.core.errors import UserError
from hocket.core.worker import Need, Steps, Strategy, Worker, strategy


@strategy("local-sgd")
@dataclass(frozen=True)
class LocalSGD(Strategy):
    """Average the replicas every `every` steps (Stich 2019, algorithm 1)."""

    every: int = 8
    momentum: Literal["keep", "average", "reset"] = "keep"
    """What becomes of the optimizer's state when replicas are averaged."""
    needs: ClassVar[frozenset[Need]] = frozenset({"collectives"})

    def check(self, workers: int) -> None:
        if self.every < 1:
            raise UserError(f"local-sgd: every must be 1 or more, got {self.every}")

    def worker(self, w: Worker) -> Steps:
        samples = 0.0
        while (g := (yield)) is not None:
            w.descend(g)
            samples += g.samples
            if w.step % self.every == 0:
                self.synchronise(w, samples)
                samples = 0.0
        if w.step % self.every != 0:  # the farewell: everyone leaves with one model
            self.synchronise(w, samples)

    def synchronise(self, w: Worker, samples: float) -> None:
        w.average_replicas(samples)
        for state in w.optimizer_state():
            match self.momentum:
                case "average":
                    w.comm.all_reduce(state, op="mean")
                case "reset":
                    state.zero_()
