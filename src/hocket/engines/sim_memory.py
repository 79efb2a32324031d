"""Shared memory in virtual time: reads and writes go block by block, and other workers run in between.

Called by the rank that holds the baton. Before each look at what is shared, everything that comes earlier in virtual
time happens; what a read or a write takes is then added to the rank's clock.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hocket.core.sharing import Sharing, Statistics
from hocket.core.staleness import Staleness
from hocket.engines.local import Wait

if TYPE_CHECKING:
    from hocket.engines.sim import SimWorld

YIELD_S = 1e-6
"""What it takes to give way to the scheduler and come back."""


class SimLock:
    """A lock, granted in the order of asking, or with a backoff to whoever asks again first after it became free.

    Readers share it where the method says so.
    """

    def __init__(self, world: SimWorld, sharing: Sharing) -> None:
        self._world, self._sharing = world, sharing
        self._queue: list[tuple[int, bool]] = []
        self._held_by: dict[int, bool] = {}
        self._free_since_s = 0.0
        self._random = random.Random(0)

    def take(self, rank: int, exclusive: bool) -> float:
        """Returns the seconds waited."""
        world = self._world
        world.catch_up(rank)
        attempt_s = began_s = world.now_s[rank]
        attempts = 0
        me = (rank, exclusive)
        self._queue.append(me)

        def ready() -> float | None:
            nonlocal attempt_s, attempts
            if not self._fits(exclusive):
                return None
            if self._sharing.backoff == "none":
                return self._free_since_s if self._queue[0] == me else None
            while attempt_s < self._free_since_s:  # these attempts have failed; nobody need have watched them
                attempts += 1
                attempt_s += backoff_s(self._sharing, attempts, self._random)
            return attempt_s

        def holders() -> str:
            return "rank " + ", ".join(map(str, self._held_by))

        world.wait(rank, Wait(f"lock of the {self._sharing.method}", holders, ready), None)
        self._queue.remove(me)
        self._held_by[rank] = exclusive
        world.changed([r for r, _ in self._queue])
        return world.now_s[rank] - began_s

    def drop(self, rank: int) -> None:
        self._world.catch_up(rank)
        del self._held_by[rank]
        self._free_since_s = self._world.now_s[rank]
        self._world.changed([r for r, _ in self._queue])

    def _fits(self, exclusive: bool) -> bool:
        return not self._held_by if exclusive else True not in self._held_by.values()


def backoff_s(sharing: Sharing, attempts: int, rng: random.Random) -> float:
    """How long to wait after so many failed attempts."""
    match sharing.backoff:
        case "constant":
            return sharing.backoff_s
        case "exponential":  # with jitter, so that two do not keep meeting
            longest = min(sharing.backoff_s * 2.0 ** min(attempts - 1, 60), sharing.backoff_max_s)
            return longest * rng.uniform(0.5, 1.0)
        case "yield":
            return YIELD_S
    return 0.0


class SimMemory:
    """The shared vector. `current` is changed in place, but under leashed, where each version is a new vector."""

    def __init__(self, world: SimWorld, sharing: Sharing, x: Tensor, byte_s: float, block: int) -> None:
        self.world, self.sharing = world, sharing
        self.current, self.version = x.clone(), 0
        self.lock = SimLock(world, sharing)
        self.staleness = Staleness(sharing.handling, sharing.workers)
        self.applied: Counter[int] = Counter()
        self.tries: Counter[int] = Counter()
        self.dropped, self.lock_wait_s = 0, 0.0
        self.held: dict[int, list[Tensor]] = {}
        """Leashed: the vectors that each worker reads or writes."""
        self.peak = 1
        self.random = random.Random(0)
        self.pass_s = x.numel() * x.element_size() * byte_s
        """One pass over the vector."""
        self._block = block

    def split(self, vector: Tensor) -> tuple[Tensor, ...]:
        return torch.split(vector, self._block)

    def count_alive(self) -> None:
        alive = {id(v) for vectors in self.held.values() for v in vectors} | {id(self.current)}
        self.peak = max(self.peak, len(alive))

    def applied_with(self, tau: int) -> None:
        self.applied[tau] += 1
        self.version += 1


@dataclass
class SimShared:
    """The shared vector as one worker sees it."""

    memory: SimMemory
    rank: int
    worker: int
    _read_version: int = 0
    _read: Tensor | None = None

    def read(self, out: Tensor) -> None:
        m, world = self.memory, self.memory.world
        match m.sharing.method:
            case "mutex" | "rwlock":
                waited_s = m.lock.take(self.rank, exclusive=m.sharing.method == "mutex")
                m.lock_wait_s += waited_s  # not in one line: others add theirs while this one waits
                self._read_version = m.version
                out.copy_(m.current)
                world.spend(self.rank, m.pass_s)
                m.lock.drop(self.rank)
            case "hogwild":
                world.catch_up(self.rank)
                self._read_version = m.version
                for source, target in zip(m.split(m.current), m.split(out), strict=True):
                    world.catch_up(self.rank)
                    target.copy_(source)
                    self._spend_on(source)
            case "leashed":  # the gradient is taken in place, at a vector that nobody changes
                world.catch_up(self.rank)
                self._read_version = m.version
                m.held[self.worker] = [m.current] if m.sharing.every == 1 else []
                out.copy_(m.current)
        if m.staleness.needs_the_read():
            self._read = out.clone()

    def publish(self, g: Tensor, lr: float) -> bool:
        m, world = self.memory, self.memory.world
        match m.sharing.method:
            case "mutex" | "rwlock":
                waited_s = m.lock.take(self.rank, exclusive=True)
                m.lock_wait_s += waited_s
                m.current.sub_(self._tempered(g, lr))
                world.spend(self.rank, 2 * m.pass_s)
                m.applied_with(m.version - self._read_version)
                m.lock.drop(self.rank)
            case "hogwild":
                world.catch_up(self.rank)
                for part, step in zip(m.split(m.current), m.split(self._tempered(g, lr)), strict=True):
                    world.catch_up(self.rank)
                    wanted = part - step
                    self._spend_on(part)
                    world.catch_up(self.rank)
                    part.copy_(wanted)  # what others wrote since the look is lost
                    self._spend_on(part)
                world.catch_up(self.rank)
                m.applied_with(m.version - self._read_version)
            case "leashed":
                return self._publish_leashed(g, lr)
        return True

    def _publish_leashed(self, g: Tensor, lr: float) -> bool:
        m, world = self.memory, self.memory.world
        m.held[self.worker] = []
        failed = 0
        while True:
            world.catch_up(self.rank)
            base, tau = m.current, m.version - self._read_version
            mine = base - self._tempered(g, lr)
            m.held[self.worker] = [base, mine]
            m.count_alive()
            world.spend(self.rank, 2 * m.pass_s)
            world.catch_up(self.rank)
            m.held[self.worker] = []
            if m.current is base:
                m.current = mine
                m.applied_with(tau)
                m.tries[failed] += 1
                return True
            failed += 1
            if m.sharing.persistence is not None and failed > m.sharing.persistence:
                m.tries[failed] += 1
                m.dropped += 1
                return False
            world.spend(self.rank, backoff_s(m.sharing, failed, m.random))

    def snapshot(self, out: Tensor) -> None:
        out.copy_(self.memory.current)

    def statistics(self) -> Statistics:
        m = self.memory
        return Statistics(
            updates=m.version,
            dropped=m.dropped,
            staleness=Counter(m.applied),
            tries=Counter(m.tries),
            lock_wait_s=m.lock_wait_s,
            peak_vectors=m.sharing.vectors - m.sharing.slots + m.peak,
        )

    def _tempered(self, g: Tensor, lr: float) -> Tensor:
        m = self.memory
        return lr * m.staleness.temper(g, m.version - self._read_version, m.current, self._read)

    def _spend_on(self, block: Tensor) -> None:
        self.memory.world.spend(self.rank, self.memory.pass_s * block.numel() / self.memory.current.numel())
