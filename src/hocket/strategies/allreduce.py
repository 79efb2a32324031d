"""Synchronous SGD: the gradients are averaged at every step."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.core.collectives import Algorithm
from hocket.core.worker import Need, Steps, Strategy, Worker, strategy


@strategy("allreduce")
@dataclass(frozen=True)
class AllReduce(Strategy):
    """Average the gradients at every step: n workers of batch b are one worker of batch n*b."""

    algorithm: Algorithm = "auto"
    """`auto` goes through memory among ranks of one host, and `native` by the engine's library; the others are written
    out in messages (core/collectives.py)."""

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"collectives"} if self.algorithm in ("auto", "native") else {"collectives", "messages"})

    @property
    def alike(self) -> bool:
        return True

    def worker(self, w: Worker) -> Steps:
        while (g := (yield)) is not None:
            w.average(g, self.algorithm)
            w.descend(g)
        w.average_buffers(self.algorithm)
