"""The engine `threads`: ranks are threads of one process."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from hocket.core.clock import RealClock
from hocket.core.errors import DeadlineExceeded
from hocket.core.sharing import SharedVector, Sharing
from hocket.core.worker import Need
from hocket.engines.crew import run_threads
from hocket.engines.engine import DEADLINE_S, Engine, Listener, Main, check_deadline, engine
from hocket.engines.local import Wait, World
from hocket.engines.nodes import ANYWHERE, Place, Placement, placement


@engine("threads")
@dataclass(frozen=True)
class Threads(Engine):
    """Ranks are threads of one process: nothing to install, and the interpreter lock to share."""

    deadline: float = DEADLINE_S
    domains: Place = "any"
    """Memory domains that workers and what they share are put in: any, one, or spread over all."""
    offers: ClassVar[frozenset[Need]] = frozenset({"messages", "collectives", "any-source", "polling", "shared-memory"})
    runs_compiled: ClassVar[bool] = True
    preference: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_deadline(self.deadline)

    def check(self, size: int) -> None:
        placement(self.domains, size)

    def run(self, main: Main, size: int, listener: Listener) -> list[Any]:
        world = ThreadWorld(size, self.deadline, placement(self.domains, size))
        return run_threads(world, main, listener)


class ThreadWorld(World):
    """Ranks wait on condition variables that share one lock."""

    offers: ClassVar[frozenset[str]] = Threads.offers
    engine: ClassVar[str] = Threads.name

    def __init__(self, size: int, deadline: float, where: Placement = ANYWHERE) -> None:
        super().__init__(size)
        self._deadline, self._where = deadline, where
        self._lock = threading.RLock()
        self._awake = [threading.Condition(self._lock) for _ in range(size)]
        self._clocks = [RealClock() for _ in range(size)]
        self._stoppable: list[Callable[[], None]] = []

    def thread_began(self, rank: int) -> None:
        self._where.settle(rank)

    def prepare_shared(self) -> None:
        from hocket.engines.mapped import load_kernels

        load_kernels()

    def make_shared(self, sharing: Sharing, x: Tensor) -> Any:
        from hocket.kernels.memory.block import Block
        from hocket.kernels.memory.vector import MappedVector, nbytes

        block = Block.anonymous(nbytes(sharing))
        self._where.lay_out(block.memory)
        vector = MappedVector.create(dataclasses.replace(sharing, deadline_s=self._deadline), x, block)
        self._stoppable.append(vector.stop)
        return vector

    def abort(self) -> None:
        for stop in self._stoppable:  # compiled workers look at nothing else
            stop()
        super().abort()

    def shared_by(self, memory: Any, rank: int, worker: int) -> SharedVector:
        shared: SharedVector = memory.seen_by(worker)
        return shared

    def exclusive(self) -> AbstractContextManager[Any]:
        return self._lock

    def clock(self, rank: int) -> RealClock:
        return self._clocks[rank]

    def changed(self, ranks: Sequence[int]) -> None:
        for r in ranks:
            self._awake[r].notify_all()

    def wait(self, rank: int, what: Wait, timeout: float | None) -> bool:
        began = time.monotonic()
        limit = self._deadline if timeout is None else timeout
        while True:
            self.check()
            if what.ready() is not None:
                return True
            left = began + limit - time.monotonic()
            if left <= 0:
                if timeout is not None:
                    return False
                raise DeadlineExceeded(rank, what.operation, what.peers(), limit)
            self._awake[rank].wait(min(left, threading.TIMEOUT_MAX))
