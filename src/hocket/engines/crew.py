"""Ranks that are threads: started, watched, asked to pause, and ended."""

from __future__ import annotations

import threading
import time
import traceback
from typing import Any

from hocket.core.brake import Brake, pull
from hocket.core.comm import Rank
from hocket.core.errors import RankFailed, named
from hocket.engines.engine import STOP_S, TICK_S, Listener, Main, explained, first_failure, operation_of
from hocket.engines.local import LocalComm, World, current

PATIENCE_S = 1.0
"""How long the ranks of a run that failed may take to end."""


class Crew:
    """One thread a rank of a world; the caller's thread keeps the listener informed."""

    def __init__(self, world: World, main: Main, listener: Listener) -> None:
        self._world, self._main, self._listener = world, main, listener
        self._results: list[Any] = [None] * world.size
        self._failures: list[RankFailed] = []
        self._hearing = threading.Lock()
        self._ended = threading.Event()
        self._brakes = [Brake() for _ in range(world.size)]
        carriers = world.carriers(self._body)
        self._threads = [threading.Thread(target=c, name=f"rank-{r}", daemon=True) for r, c in enumerate(carriers)]

    def run(self) -> list[Any]:
        try:
            for thread in self._threads:
                thread.start()
            try:
                self._watch(None)
            except KeyboardInterrupt:  # once: the ranks pause, save, and tell what there is
                pull(self._brakes, "stop")
                self._watch(STOP_S)
            self._join(PATIENCE_S if self._failures else None)
        except BaseException:
            self._world.abort()
            self._join(PATIENCE_S)
            raise
        if self._failures:
            raise explained(first_failure(self._failures), self._world.statuses)
        return self._results

    def _body(self, number: int) -> None:
        world, status = self._world, self._world.statuses[number]

        def tell(kind: str, data: dict[str, Any], blob: bytes = b"") -> None:
            if kind == "brake":
                pull(self._brakes, data["purpose"])
                return
            with self._hearing:
                self._listener.hear(number, kind, data, blob)

        try:
            world.thread_began(number)
            comm = LocalComm(world, 0, range(world.size), number)
            brake, turns = self._brakes[number], world.turns(number)
            clock, together = world.clock(number), world.together
            rank = Rank(comm, clock, tell, status, world.offers, brake, world.engine, turns, together)
            current.set(rank)
            self._results[number] = self._main(rank)
        except BaseException as error:  # a rank that fails must not leave the others waiting
            failure = RankFailed(number, operation_of(error, status), named(error), traceback.format_exc())
            self._failures.append(failure)
            world.abort()
        finally:
            world.thread_ended(number)
            self._ended.set()

    def _watch(self, limit_s: float | None) -> None:
        """Until all ranks have ended, or one has failed."""
        until = None if limit_s is None else time.monotonic() + limit_s
        while not self._failures and any(thread.is_alive() for thread in self._threads):
            self._ended.wait(TICK_S)
            self._ended.clear()
            self._tick()
            if until is not None and time.monotonic() > until:
                raise KeyboardInterrupt
        if self._failures:
            self._world.abort()
            self._tick()  # how far they came since the last one decides what is said of it

    def _tick(self) -> None:
        with self._hearing:
            self._listener.tick([status.seen() for status in self._world.statuses])

    def _join(self, patience_s: float | None) -> None:
        """Wait for all; after a failure one may be stuck in the user's code: it is a daemon, so leave it."""
        until = None if patience_s is None else time.monotonic() + patience_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(None if until is None else max(until - time.monotonic(), 0.0))


def run_threads(world: World, main: Main, listener: Listener) -> list[Any]:
    return Crew(world, main, listener).run()
