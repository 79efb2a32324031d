"""Who trains on which batch, and where workers that do not wait for each other meet nevertheless."""

from __future__ import annotations

import time
from typing import Literal, NamedTuple

import torch

from hocket.core.brake import Brake
from hocket.core.clock import Clock
from hocket.core.comm import Comm

# One number that all workers count up holds, from its lowest bits: tickets given out; how often all were taken away;
# calls for a meeting, those of them that hold, those that came too late; workers that evaluate the model just now;
# workers that have left.
_ALL, _TICKETS = 1 << 32, 1 << 36
_CALL, _HOLDS, _VOID, _WATCH, _LEFT = 1 << 36, 1 << 40, 1 << 44, 1 << 48, 1 << 52
_FOUR_BITS = 15


class Draw(NamedTuple):
    """What a worker finds when it wants the next batch."""

    ticket: int
    """To hold; the pool's `total` or more where none is left."""
    meets: bool
    """Whether all workers meet before this one trains on its ticket, or leaves."""
    waits: bool
    """Whether somebody evaluates the model just now."""


class Pool:
    """One pool of batches, in the order of the data: who is fast takes more of them.

    Tickets go from 0 to `total`. Now and then all workers meet, each with a ticket in its hand that it has not trained
    on: at every `meet_every` tickets, `at_the_end` if that is wanted, and when worker 0 calls because its brake was
    pulled. A worker that finds no ticket leaves. A call holds if nobody had left before it, so that everyone still
    hears it; else it is void.

    Where a worker is several ranks, its `ensemble`, the first of them draws for all. The others have pools whose
    numbers nobody looks at, and find what it found.
    """

    def __init__(
        self, comm: Comm, total: int, meet_every: float, at_the_end: bool, ensemble: Comm | None = None
    ) -> None:
        self._comm, self._counter, self._worker, self._ensemble = comm, comm.counter(), comm.rank, ensemble
        self.total, self._meet_every, self._meet_at_the_end = total, meet_every, at_the_end
        self.held = -1
        """The ticket in this worker's hand, -1 for none."""
        self._met = 0
        self._called = False

    def draw(self, brake: Brake) -> Draw:
        if self._ensemble is None:
            return self._draw(brake)
        told = torch.tensor(self._draw(brake) if self._ensemble.rank == 0 else Draw(0, False, False), dtype=torch.int64)
        self._ensemble.broadcast(told)
        self.held, meets, waits = told.tolist()
        return Draw(self.held, bool(meets), bool(waits))

    def _draw(self, brake: Brake) -> Draw:
        if self.held < 0:
            self._heard = self._counter.take()
            self.held = self._heard % _TICKETS
            if self.held >= self.total:
                self._heard = self._counter.take(_LEFT)
        return Draw(self.held, self._must_meet(brake), self._watched)

    def spend(self) -> None:
        """The ticket has been trained on."""
        self.held = -1

    def _must_meet(self, brake: Brake) -> bool:
        if brake.purpose is not None and self._worker == 0 and not self._called and self.held < self.total:
            self._called = True
            self._call()
        at_the_end = self._meet_at_the_end and self.held >= self.total
        return at_the_end or self._meetings_before(self.held) > self._met or self._call_holds()

    def _meetings_before(self, ticket: int) -> int:
        return int(min(ticket % _ALL, self.total) // self._meet_every)

    def _call(self) -> None:
        before = self._counter.take(_CALL)
        holds = before // _LEFT == 0 and before % _TICKETS < self.total
        self._heard = self._counter.take(_HOLDS if holds else _VOID) + (_HOLDS if holds else _VOID)

    def _call_holds(self) -> bool:
        """Whether one of the calls that this worker has heard holds; who called says so a moment later."""
        if self._heard < _CALL:  # nobody has called
            return False
        while True:
            calls, hold, void = (self._heard // unit & _FOUR_BITS for unit in (_CALL, _HOLDS, _VOID))
            if hold or calls == void:
                return hold > 0
            time.sleep(0.001)
            self._heard = self._counter.take(0)

    def met(self) -> None:
        """The meeting is over. All workers call it before any of them draws again."""
        slowest = torch.tensor([self.held])
        self._comm.all_reduce(slowest, "min")  # who came because of a call has other meetings still before it
        self._met = self._meetings_before(int(slowest))
        if slowest >= self.total:
            self._meet_at_the_end = False
        self._called = False
        if self._worker == 0:
            signs = self._counter.take(0) // _TICKETS * _TICKETS
            self._counter.take(-signs)
        self._heard = 0

    def rejoin(self) -> None:
        """After a meeting: who was about to leave says so again."""
        if self.held >= self.total:
            self._heard = self._counter.take(_LEFT)

    def watch(self, begins: Literal[1, -1]) -> None:
        """This worker begins (+1) or ends (-1) to evaluate the model."""
        self._counter.take(begins * _WATCH)

    @property
    def _watched(self) -> bool:
        return self._heard // _WATCH & _FOUR_BITS > 0

    def wait(self, clock: Clock) -> None:
        """Until nobody evaluates the model any more; a real clock stands still."""
        if self._ensemble is None or self._ensemble.rank == 0:
            clock.wait_while(self._still_watched)
        if self._ensemble is not None:
            with clock.paused():
                self._ensemble.barrier()

    def _still_watched(self) -> bool:
        self._heard = self._counter.take(0)
        return self._watched

    def empty(self) -> None:
        """Leave no ticket for anyone: the run has reached its goal."""
        if self._counter.take(0) % _TICKETS < _ALL:  # not once for every worker that finds it
            self._counter.take(_ALL)

    def state(self) -> dict[str, int]:
        """Without what `empty` did: who goes on has another goal."""
        return {"given": self._counter.take(0) % _ALL, "held": self.held % _ALL, "met": self._met}

    def load_state(self, saved: dict[str, int]) -> None:
        """Before any worker draws."""
        if self._worker == 0:
            self._counter.take(saved["given"])
        self.held, self._met = saved["held"], saved["met"]
        self._heard = 0

    def close(self) -> None:
        self._counter.close()
