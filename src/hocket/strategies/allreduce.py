"""Synchronous SGD: the gradients are averaged at every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from hocket.core.collectives import Algorithm
from hocket.core.errors import UserError
from hocket.core.replica import Gradient
from hocket.core.worker import Need, Steps, Strategy, Worker, strategy


@strategy("allreduce")
@dataclass(frozen=True)
class AllReduce(Strategy):
    """Average the gradients at every step: n workers of batch b are one worker of batch n*b."""

    algorithm: Algorithm = "auto"
    """`auto` goes through memory among ranks of one host, and `native` by the engine's library; the others are written
    out in messages (core/collectives.py)."""
    overlap: Literal["off", "on"] = "off"
    """`on`: a gradient is averaged in buckets, which leave while the rest of it is computed."""
    bucket: int = 1024
    """Size of a bucket in KiB, of the first one an eighth; a layer is never split."""

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"collectives"} if self.algorithm in ("auto", "native") else {"collectives", "messages"})

    @property
    def alike(self) -> bool:
        return True

    @property
    def sends_early(self) -> bool:
        return self.overlap == "on"

    def check(self, workers: int) -> None:
        if not 1 <= self.bucket < 2**30:
            raise UserError(f"allreduce: bucket must be 1 KiB or more, and less than 2**30; got {self.bucket}")
        if self.sends_early and self.algorithm not in ("auto", "native"):
            raise UserError(
                f"allreduce: algorithm={self.algorithm} is written out in messages, which nobody sees to while a "
                "worker computes; with overlap=on use algorithm=auto or native"
            )

    def idle(self) -> Mapping[str, str]:
        return {} if self.sends_early else {"bucket": "overlap"}

    def worker(self, w: Worker) -> Steps:
        average: Callable[[Gradient], None] = partial(w.average, algorithm=self.algorithm)
        if self.sends_early:
            average = w.average_in_buckets(1024 * self.bucket, self.algorithm)
        while (g := (yield)) is not None:
            average(g)
            w.descend(g)
        w.average_buffers(self.algorithm)
