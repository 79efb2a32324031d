"""Shared memory: all workers read and write one parameter vector, and differ in how they keep out of the way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hocket.core.errors import UserError
from hocket.core.memory_use import untouched_zeros
from hocket.core.sharing import SMALLEST_LR, Backoff, Method, SharedVector, Sharing
from hocket.core.staleness import Handling
from hocket.core.state import State
from hocket.core.worker import Need, Steps, Strategy, Worker, strategy

CACHED = 1 << 18
"""Parameters that a core keeps near: 1 MiB. Where a copy of them is far, lines that others write cost little more."""
FEW_WORKERS = 2
"""Whose gradients are fresh enough to be applied as they are, at rates that suit a serial run."""


def publish_step(shared: SharedVector, step: Tensor, lr: float) -> None:
    """Descend by a step, as the gradient that compensation for delay looks at; a schedule may begin or end at 0."""
    scale = lr if lr > SMALLEST_LR else 1.0
    shared.publish(step.div_(scale), scale)


@dataclass(frozen=True)
class SharedMemory(Strategy):
    """Read the vector, compute a gradient, publish the step: without ever waiting for another worker's gradient."""

    method: ClassVar[Method]
    backoff: Backoff = "none"
    """What a worker does between two attempts to get in: nothing, a constant wait, one that doubles, or give way."""
    backoff_us: float = 1.0
    """Microseconds of a constant wait, and of the first that doubles."""
    backoff_max_us: float = 1000.0
    stale: Literal[Handling, "auto"] = "auto"
    """How stale gradients are tempered; `auto` is `gap-mean` for more than 2 workers, else `none`, and `none` for
    compiled workers that change only what a sample touches."""
    every: int = 1
    """Batches that a worker takes on a copy of its own before it writes what they changed. 1 is the method as
    published; more means fewer writes, and staler ones."""

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"shared-memory", "collectives"})

    @property
    def lockstep(self) -> bool:
        return False

    def check(self, workers: int) -> None:
        if not 1e-3 <= self.backoff_us <= self.backoff_max_us < 1e6:
            raise UserError(
                f"{self.name}: 0.001 <= backoff_us <= backoff_max_us < 1000000 must hold, "
                f"got backoff_us={self.backoff_us:g}, backoff_max_us={self.backoff_max_us:g}"
            )
        self.sharing(1, workers)

    def idle(self) -> Mapping[str, str]:
        used = {"none": (), "yield": (), "constant": ("backoff_us",), "exponential": ("backoff_us", "backoff_max_us")}
        return dict.fromkeys({"backoff_us", "backoff_max_us"}.difference(used[self.backoff]), "backoff")

    def sharing(self, dim: int, workers: int) -> Sharing:
        """How a vector of this length is shared between so many workers."""
        return Sharing(
            self.method,
            dim,
            workers,
            persistence=self.failures_allowed(),
            backoff=self.backoff,
            backoff_s=self.backoff_us / 1e6,
            backoff_max_s=self.backoff_max_us / 1e6,
            handling=self.handling(workers),
            every=self.every,
        )

    def compiled_sharing(self, dim: int, workers: int, *, sparse: bool = False, by_rows: bool = False) -> Sharing:
        sharing = self.sharing(dim, workers)
        if sparse and self.stale == "auto":  # sparse updates hardly meet, and their tempering takes longer than they do
            return replace(sharing, handling="none")
        return sharing

    def handling(self, workers: int) -> Handling:
        """Tempering takes a copy of what was read, which only pays where gradients are old: about workers - 1."""
        if self.stale != "auto":
            return self.stale
        return "gap-mean" if workers > FEW_WORKERS else "none"

    def step_scale(self, workers: int) -> float:
        return 1.0  # nothing is averaged

    def consensus(self, w: Worker) -> Tensor:
        now = torch.empty_like(w.x)
        w.shared.snapshot(now)
        return now

    def failures_allowed(self) -> int | None:
        """Failed attempts after which an update is dropped; None is never."""
        return None

    def worker(self, w: Worker) -> Steps:
        shared = w.shared
        if not w.step:
            shared.read(w.x)
        before = w.keep("before", untouched_zeros(w.x.numel(), w.x.dtype, w.x.device))  # compiled workers need none
        since = w.keep("since", State(batches=0, lr=0.0))  # the last write: how many, and the highest rate
        while (g := (yield)) is not None:
            if not g.samples:  # there were more workers than batches left
                continue
            if not since.batches:
                before.copy_(w.x)
            since.lr = max(since.lr, w.lr)
            g.vector.mul_(w.portion(g))
            w.descend(g)  # the worker's own optimizer says which way, the shared vector goes there
            since.batches += 1
            if since.batches == self.every:
                publish_step(shared, before.sub_(w.x), since.lr)
                shared.read(w.x)
                since.batches, since.lr = 0, 0.0
        if since.batches:
            publish_step(shared, before.sub_(w.x), since.lr)
        w.comm.barrier()  # everyone's updates are in
        shared.read(w.x)
        w.average_buffers()


@strategy("mutex")
@dataclass(frozen=True)
class Mutex(SharedMemory):
    """One lock around each read and each update of a shared vector."""

    method: ClassVar[Method] = "mutex"


@strategy("rwlock")
@dataclass(frozen=True)
class ReadWriteLock(SharedMemory):
    """A read-write lock around a shared vector: many read at once, one writes."""

    method: ClassVar[Method] = "rwlock"


@strategy("hogwild")
@dataclass(frozen=True)
class Hogwild(SharedMemory):
    """HOGWILD! (Niu 2011): no locks; reads and adds race, component by component."""

    method: ClassVar[Method] = "hogwild"
    exchange: Literal["auto", "weights"] = "auto"
    """What compiled workers of a sparse linear model pass on: `weights` that all write, as published; `auto` is what
    each row adds, where every worker has a copy that is small enough, and `weights` elsewhere."""

    def idle(self) -> Mapping[str, str]:
        nothing = dict.fromkeys(("backoff", "backoff_us", "backoff_max_us"), "")  # there is nothing to get into
        return nothing | ({"exchange": "every"} if self.every > 1 else {})

    def compiled_sharing(self, dim: int, workers: int, *, sparse: bool = False, by_rows: bool = False) -> Sharing:
        """By rows, a batch costs its lines of slopes, not a quarter of the vector's (see docs/shared-memory.md)."""
        found = super().compiled_sharing(dim, workers, sparse=sparse)
        plain = found.every == 1 and found.handling == "none"
        if by_rows and workers > 1 and plain and self.exchange == "auto" and dim <= CACHED:
            return replace(found, by_rows=True)
        return found


@strategy("leashed")
@dataclass(frozen=True)
class Leashed(SharedMemory):
    """Leashed-SGD (Bäckström 2021): immutable vectors, published by compare-and-swap, without locks."""

    method: ClassVar[Method] = "leashed"
    persistence: float = math.inf
    """Failed attempts that an update may have before it is dropped; `inf` is any number."""

    def check(self, workers: int) -> None:
        if self.persistence < 0 or (self.persistence != math.inf and self.persistence != int(self.persistence)):
            raise UserError(f"leashed: persistence must be 0, 1, 2, ... or inf; got {self.persistence:g}")
        super().check(workers)

    def failures_allowed(self) -> int | None:
        return None if self.persistence == math.inf else int(self.persistence)
