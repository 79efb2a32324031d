"""DiLoCo: local steps of any optimizer, then one outer step along what they changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from hocket.core.errors import UserError
from hocket.core.state import State
from hocket.core.weight import Weight
from hocket.core.worker import Need, Steps, Strategy, Worker, strategy


@strategy("diloco")
@dataclass(frozen=True)
class DiLoCo(Strategy):
    """Local steps, then an outer step of Nesterov momentum along the mean change (Douillard 2023, algorithm 1).

    With fragments one part of the model after the other takes its outer step, and with a delay what it needs for that
    is sent while the local steps go on (Streaming DiLoCo, Douillard 2025).
    """

    every: int = 16
    """Local steps between outer steps; the paper has 500, for runs of many thousands."""
    lr: float = 0.7
    """Of the outer optimizer."""
    momentum: float = 0.9
    """Nesterov's, of the outer optimizer; the inner optimizer's state stays with its worker."""
    fragments: int = 1
    """Parts of the model, each with its own turn within `every` steps: as many bytes, in smaller portions."""
    delay: int = 0
    """Local steps that a fragment is on its way for; 0 waits for it."""
    mix: float = 0.5
    """How much of a worker's own fragment stays in it when the outer step comes, after a delay."""

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"collectives"})

    @property
    def sends_early(self) -> bool:
        return self.delay > 0

    def idle(self) -> Mapping[str, str]:
        return {} if self.delay else {"mix": "delay"}

    def check(self, workers: int) -> None:
        if self.every < 1:
            raise UserError(f"diloco: every must be 1 or more, got {self.every}")
        if not 1 <= self.fragments <= self.every:
            raise UserError(f"diloco: fragments must be from 1 to every ({self.every}), got {self.fragments}")
        if not 0 <= self.delay < self.every:
            raise UserError(f"diloco: delay must be at least 0 and less than every ({self.every}), got {self.delay}")
        if not 0 <= self.mix < 1:
            raise UserError(f"diloco: mix must be at least 0 and less than 1, got {self.mix:g}")
        if self.lr <= 0:
            raise UserError(f"diloco: lr must be greater than 0, got {self.lr:g}")
        if not 0 <= self.momentum < 1:
            raise UserError(f"diloco: momentum must be at least 0 and less than 1, got {self.momentum:g}")

    def step_scale(self, workers: int) -> float:
        return self.lr / (1 - self.momentum) / workers

    def part(self, w: Worker) -> tuple[Tensor, float]:
        return w.x, w.kept("seen").since[0].samples or 1.0

    def worker(self, w: Worker) -> Steps:
        anchor = w.keep("anchor", w.x.clone())  # the model that all workers set out from
        velocity = w.keep("velocity", torch.zeros_like(anchor))
        ends = [0, *accumulate(len(part) for part in w.x.tensor_split(self.fragments))]
        spans = [slice(begin, end) for begin, end in pairwise(ends)]
        # The samples since the last outer step of each fragment
        seen = w.keep("seen", State(since=[Weight() for _ in range(self.fragments)]))
        meanwhile = w.average_meanwhile(spans) if self.delay else None

        def merge(f: int) -> None:
            """The outer step of a fragment that left some steps ago."""
            assert meanwhile is not None
            self.outer_step(meanwhile.mean(f), anchor[spans[f]], velocity[spans[f]])
            w.x[spans[f]].lerp_(anchor[spans[f]], 1 - self.mix)

        while (g := (yield)) is not None:
            w.descend(g)
            for f, span in enumerate(spans):
                seen.since[f] += g.weight
                if meanwhile and meanwhile.left.at[f] == w.step - self.delay > 0:
                    merge(f)
                if self.has_turn(f, w.step):
                    if meanwhile:
                        meanwhile.start(f, w.step, seen.since[f])
                    else:
                        w.average_replicas(seen.since[f], since=anchor, span=span)
                        self.outer_step(w.x[span], anchor[span], velocity[span])
                        w.x[span].copy_(anchor[span])
                    seen.since[f] = Weight()
        for f, span in enumerate(spans):  # the farewell: everyone leaves with one model
            if meanwhile and meanwhile.left.at[f]:
                merge(f)
            if meanwhile or not self.has_turn(f, w.step):
                w.average_replicas(seen.since[f], since=anchor, span=span)

    def has_turn(self, fragment: int, step: int) -> bool:
        return (step - fragment * self.every // self.fragments) % self.every == 0

    def outer_step(self, mean: Tensor, anchor: Tensor, velocity: Tensor) -> None:
        change = anchor - mean  # old minus new: an outer gradient, to be descended
        velocity.mul_(self.momentum).add_(change)
        anchor.add_(change + self.momentum * velocity, alpha=-self.lr)
