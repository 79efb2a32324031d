"""Synchronous SGD: the gradients are averaged at every step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from hocket.core.collectives import ALGORITHMS
from hocket.core.worker import Need, Steps, Strategy, Worker, strategy


@strategy("allreduce")
@dataclass(frozen=True)
class AllReduce(Strategy):
    """Average the gradients at every step: n workers of batch b are one worker of batch n*b."""

    algorithm: Literal["native", "ring", "halving", "tree"] = "native"
    """`native` is the engine's own; the others are written out in messages (core/collectives.py)."""

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"collectives", "messages"})

    def worker(self, w: Worker) -> Steps:
        if self.algorithm != "native":
            w.all_reduce = partial(ALGORITHMS[self.algorithm], w.comm)
        while (g := (yield)) is not None:
            w.average(g)
            w.descend(g)
        w.average_buffers()
