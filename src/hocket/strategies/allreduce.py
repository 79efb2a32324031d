"""Synchronous SGD: the gradients are averaged at every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hocket.core.worker import Need, Steps, Strategy, Worker, strategy


@strategy("allreduce")
@dataclass(frozen=True)
class AllReduce(Strategy):
    """Average the gradients at every step: n workers of batch b are one worker of batch n*b."""

    needs: ClassVar[frozenset[Need]] = frozenset({"collectives"})

    def worker(self, w: Worker) -> Steps:
        while (g := (yield)) is not None:
            w.average(g)
            w.descend(g)
        w.average_buffers()
