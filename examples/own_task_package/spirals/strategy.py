"""A strategy of one's own: average gradients for a while, then let the workers go their ways and average at the end."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.core.worker import Need, Steps, Strategy, Worker, strategy


@strategy("warm-start")
@dataclass(frozen=True)
class WarmStart(Strategy):
    """Average the gradients for the first `steps` steps, and the replicas once, in the end."""

    steps: int = 100

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"collectives"})

    def worker(self, w: Worker) -> Steps:
        while (g := (yield)) is not None:
            if w.step <= self.steps:
                w.average(g)
            w.descend(g)
        w.average_replicas()
