"""Shared memory in virtual time: reads and writes go block by block, and other workers run in between.

Called by the rank that holds the baton. Before each look at what is shared, everything that comes earlier in virtual
time happens; what a read or a write takes is then added to the rank's clock.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hocket.core.sharing import Sharing, Statistics
from hocket.core.staleness import Staleness
from hocket.core.state import refill
from hocket.engines.local import Wait

if TYPE_CHECKING:
    from hocket.engines.sim import SimWorld

PARAMETERS_A_LINE = 16
"""Of 4 bytes in a cache line of 64."""
PARAMETERS_UNDER_WAY = 1024
"""Which a core has looked at or stored, and whose lines are still on their way: the depth of its queue of stores."""
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
        self.random = random.Random(0)

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
                attempt_s += backoff_s(self._sharing, attempts, self.random)
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


@dataclass(frozen=True)
class Piece:
    """A part of an update that a worker writes at once."""

    where: slice | Tensor
    domain: int
    near_s: float
    """What that takes where it is near and idle."""


class SimulatedMemory:
    """What the workers share. `current` is changed in place, but under leashed, where each version is a new vector."""

    def __init__(self, world: SimWorld, sharing: Sharing, x: Tensor) -> None:
        self.world, self.sharing = world, sharing
        self.current, self.version = x.clone(), 0
        self.lock = SimLock(world, sharing)
        self.staleness = [Staleness(sharing.handling, sharing.workers, x) for _ in range(sharing.workers)]
        """As each worker sees it."""
        self.tries: Counter[int] = Counter()
        self.dropped, self.lock_wait_s = 0, [0.0] * sharing.workers
        self.held: dict[int, list[int]] = {}
        """Leashed: the versions that each worker reads or writes. One that is not published is below 0."""
        self.peak = 1
        self.random = random.Random(0)
        self.written, self.canary = 0, Counter[int]()
        """HOGWILD!: pieces of updates that were written, and how many survived, by their place in the update: each
        adds 1 there as it adds to the parameters."""
        self.parameter_s = x.element_size() * world.memory_byte_s
        """What it takes to read or write one parameter in passing."""
        self.pass_s = x.numel() * self.parameter_s
        """One pass over the vector."""
        others_near = (sharing.workers - 1) * min(1.0, PARAMETERS_UNDER_WAY / x.numel())
        self.line_s = 2 * PARAMETERS_A_LINE * self.parameter_s
        self.window_s = self.line_s * max(1.0, world.window * others_near)
        """HOGWILD!: from the look at a parameter to where others see what was stored there. A line that others want too
        is passed on from core to core, and stores queue up behind it; in a long vector the others are elsewhere."""

    def blocks(self) -> list[slice]:
        dim, block = self.sharing.dim, self.world.block
        return [slice(at, min(at + block, dim)) for at in range(0, dim, block)]

    def pieces(self, step: Tensor) -> list[Piece]:
        """Where an update of HOGWILD! writes before others may come in between.

        A sparse one writes only the parameters that it changes, and moves a line of the cache for each.
        """
        changed = step.nonzero().flatten()
        if len(changed) * PARAMETERS_A_LINE >= len(step):
            return [Piece(span, self.domain(i), 2 * self.passing_s(span)) for i, span in enumerate(self.blocks())]
        lying = [(0, changed)]
        if domains := self.world.domains:
            where = changed // self.world.block % domains.count
            lying = [(domain, changed[where == domain]) for domain in sorted(set(where.tolist()))]
        return [
            Piece(some, domain, len(some) * self.line_s)
            for domain, there in lying
            for some in torch.split(there, self.world.block)
        ]

    def domain(self, block: int) -> int:
        """Where a block lies."""
        return block % self.world.domains.count if self.world.domains else 0

    def passing_s(self, span: slice) -> float:
        """One pass over so many parameters, near and idle."""
        return int(span.stop - span.start) * self.parameter_s

    def reach(self, rank: int, worker: int, domain: int, near_s: float) -> float:
        """Wait for a domain's controller; returns how long the worker then takes."""
        world = self.world
        if world.domains is None or world.free[rank]:
            return near_s
        wait_s, takes_s = world.domains.serve(worker, domain, near_s, world.now_s[rank])
        if wait_s:
            world.spend(rank, wait_s)
            world.catch_up(rank)
        return takes_s

    def go_over(self, rank: int, worker: int, passes: int) -> None:
        """Spend what so many passes over the whole vector take."""
        if self.world.domains is None:
            self.world.spend(rank, passes * self.pass_s)
            return
        for i, span in enumerate(self.blocks()):
            self.world.catch_up(rank)
            self.world.spend(rank, self.reach(rank, worker, self.domain(i), passes * self.passing_s(span)))

    def read_in_passing(self, rank: int, worker: int) -> None:
        """Spend what a gradient takes longer at the shared vector than at one that is near and idle: its own time has
        that already. It asks each domain once for all that lies there."""
        if self.world.domains is None:
            return
        near_s: dict[int, float] = defaultdict(float)
        for i, span in enumerate(self.blocks()):
            near_s[self.domain(i)] += self.passing_s(span)
        for domain, there_s in near_s.items():
            self.world.catch_up(rank)
            self.world.spend(rank, self.reach(rank, worker, domain, there_s) - there_s)

    def count_alive(self) -> None:
        alive = {version for versions in self.held.values() for version in versions} | {self.version}
        self.peak = max(self.peak, len(alive))

    def statistics(self) -> Statistics:
        return Statistics(
            updates=self.version,
            dropped=self.dropped,
            staleness=sum((s.histogram for s in self.staleness), Counter()),
            tries=Counter(self.tries),
            lock_wait_s=sum(self.lock_wait_s),
            peak_vectors=self.sharing.vectors - self.sharing.slots + self.peak,
            lost=1 - self.canary.total() / self.written if self.written else 0.0,
        )

    def state(self) -> dict[str, Any]:
        """Of the lock there is nothing to tell while all workers meet: nobody holds it or waits for it."""
        return {
            "x": self.current.clone(),
            "version": self.version,
            "tries": Counter(self.tries),
            "dropped": self.dropped,
            "lock_wait_s": list(self.lock_wait_s),
            "peak": self.peak,
            "written": self.written,
            "canary": Counter(self.canary),
            "random": self.random.getstate(),
            "lock_random": self.lock.random.getstate(),
            "controllers_free_s": dict(self.world.domains.free_s) if self.world.domains else {},
        }

    def load_state(self, saved: dict[str, Any]) -> None:
        self.current = saved["x"].clone()
        self.version, self.tries = saved["version"], Counter(saved["tries"])
        self.dropped, self.lock_wait_s, self.peak = saved["dropped"], list(saved["lock_wait_s"]), saved["peak"]
        self.written, self.canary = saved["written"], Counter(saved["canary"])
        self.random.setstate(saved["random"])
        self.lock.random.setstate(saved["lock_random"])
        if self.world.domains:
            self.world.domains.free_s = dict(saved["controllers_free_s"])


class SimulatedVector:
    """The shared vector as one worker sees it."""

    def __init__(self, memory: SimulatedMemory, rank: int, worker: int) -> None:
        self.memory, self._rank, self._worker = memory, rank, worker
        self._staleness = memory.staleness[worker]
        self._read_version = 0
        self._read: Tensor | None = None

    def read(self, out: Tensor) -> int:
        with self.memory.world.exclusive():
            return self._do_read(out)

    def publish(self, g: Tensor, lr: float) -> bool:
        with self.memory.world.exclusive():
            return self._do_publish(g, lr)

    def _do_read(self, out: Tensor) -> int:
        m, world = self.memory, self.memory.world
        match m.sharing.method:
            case "mutex" | "rwlock":
                m.lock_wait_s[self._worker] += m.lock.take(self._rank, exclusive=m.sharing.method == "mutex")
                self._read_version = m.version
                out.copy_(m.current)
                m.go_over(self._rank, self._worker, 1)
                m.lock.drop(self._rank)
            case "hogwild":
                world.catch_up(self._rank)
                self._read_version = m.version
                for i, span in enumerate(m.blocks()):
                    world.catch_up(self._rank)
                    takes_s = m.reach(self._rank, self._worker, m.domain(i), m.passing_s(span))
                    out[span] = m.current[span]
                    world.spend(self._rank, takes_s)
            case "leashed":  # the gradient is taken in place, at a vector that nobody changes
                world.catch_up(self._rank)
                self._read_version = m.version
                m.held[self._worker] = [m.version] if m.sharing.every == 1 else []
                out.copy_(m.current)
                m.read_in_passing(self._rank, self._worker)
        if self._staleness.needs_the_read():
            self._read = out.clone()
        return self._read_version

    def _do_publish(self, g: Tensor, lr: float) -> bool:
        m, world = self.memory, self.memory.world
        self._staleness.observe(g, lr)
        match m.sharing.method:
            case "mutex" | "rwlock":
                m.lock_wait_s[self._worker] += m.lock.take(self._rank, exclusive=True)
                m.current.sub_(self._tempered(g, lr))
                m.go_over(self._rank, self._worker, 2)
                self._applied(m.version)
                m.lock.drop(self._rank)
            case "hogwild":
                world.catch_up(self._rank)
                step = self._tempered(g, lr)
                for place, piece in enumerate(m.pieces(step)):
                    self._write(place, piece, step[piece.where])
                world.catch_up(self._rank)
                self._applied(m.version)
            case "leashed":
                return self._publish_leashed(g, lr)
        return True

    def _write(self, place: int, piece: Piece, step: Tensor) -> None:
        """Look, subtract and store: what others stored within that window is lost."""
        m, world, where = self.memory, self.memory.world, piece.where
        world.catch_up(self._rank)
        takes_s = m.reach(self._rank, self._worker, piece.domain, piece.near_s)
        window_s = min(m.window_s, takes_s)
        wanted, survived = m.current[where] - step, m.canary[place] + 1
        world.spend(self._rank, window_s)
        world.catch_up(self._rank)
        m.current[where], m.canary[place] = wanted, survived
        m.written += 1
        world.spend(self._rank, takes_s - window_s)

    def _publish_leashed(self, g: Tensor, lr: float) -> bool:
        m, world = self.memory, self.memory.world
        m.held[self._worker] = []
        failed, failed_s = 0, math.inf
        while True:
            world.catch_up(self._rank)
            base = m.version
            mine = m.current - self._tempered(g, lr)
            m.held[self._worker] = [base, -1 - self._worker]
            m.count_alive()
            m.go_over(self._rank, self._worker, 2)
            world.catch_up(self._rank)
            m.held[self._worker] = []
            if m.version == base:
                m.current = mine
                self._applied(base)
                self._end_tries(failed, failed_s)
                return True
            failed, failed_s = failed + 1, min(failed_s, world.now_s[self._rank])
            if m.sharing.persistence is not None and failed > m.sharing.persistence:
                self._end_tries(failed, failed_s)
                m.dropped += 1
                return False
            world.spend(self._rank, backoff_s(m.sharing, failed, m.random))

    def _end_tries(self, failed: int, first_s: float) -> None:
        self.memory.tries[failed] += 1
        self.memory.lock_wait_s[self._worker] += max(self.memory.world.now_s[self._rank] - first_s, 0.0)

    def snapshot(self, out: Tensor) -> None:
        out.copy_(self.memory.current)

    def lock_wait_s(self) -> float:
        return self.memory.lock_wait_s[self._worker]

    def statistics(self) -> Statistics:
        return self.memory.statistics()

    def state(self) -> dict[str, Any]:
        own = {
            "read_version": self._read_version,
            "staleness": Counter(self._staleness.histogram),
            "seen": self._staleness.seen,
            "mean_square": self._staleness.mean_square,
            "largest_lr": self._staleness.largest_lr,
            "held": list(self.memory.held.get(self._worker, [])),
        }
        if self._read is not None:
            own["read"] = self._read.clone()
        return own | {"common": self.memory.state()} if self._worker == 0 else own

    def load_state(self, saved: dict[str, Any]) -> None:
        self._read_version, self._read = saved["read_version"], saved.get("read")
        names = ("seen", "mean_square", "largest_lr")
        refill(self._staleness, {"histogram": saved["staleness"]} | {name: saved[name] for name in names})
        self.memory.held[self._worker] = list(saved["held"])
        if self._worker == 0:
            self.memory.load_state(saved["common"])

    def _tempered(self, g: Tensor, lr: float) -> Tensor:
        m = self.memory
        return lr * self._staleness.attempt(g, m.version - self._read_version, m.current, self._read)

    def _applied(self, version: int) -> None:
        """This worker's update came on top of `version`."""
        self._staleness.histogram[version - self._read_version] += 1
        self.memory.version += 1
