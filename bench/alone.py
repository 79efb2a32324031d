"""What a rank of a real run computes, without the others: its messages go to nobody, and it is timed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from hocket.core.comm import ANY, Comm, Deferred, Op
from hocket.core.message import Message
from hocket.engines import post
from hocket.engines.commons import Patience
from hocket.kernels.memory.block import Block

NAP_S = 1e-4
"""How long a rank is away from its core where there are more ranks than cores: long enough for another to take it."""


def clock_of(crowded: bool) -> Callable[[], float]:
    """By what a rank's work is timed: who has a core of its own takes as long as it takes, also where the host takes
    that core away or the system uses it; where ranks share cores the simulator hands them out."""
    return time.thread_time if crowded else time.perf_counter


class Watch:
    """Seconds that a rank computes from one `lap` to the next. In between it waits as it does for others in a run, so
    it finds there what others leave in the caches. `wait` may say since when there was nothing to wait for."""

    def __init__(self, clock: Callable[[], float], wait: Callable[[], float | None] = os.sched_yield) -> None:
        self.found: list[float] = []
        self._clock, self._wait = clock, wait
        self._began = clock()

    def lap(self) -> None:
        self.found.append(self._clock() - self._began)
        self._began = self._wait() or self._clock()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        stopped = self._clock()
        yield
        self._began += self._clock() - stopped


def meet(comm: Comm) -> float:
    """Wait until all ranks are here; returns when the last one came. Who wakes up late is late from then on."""
    came = torch.tensor([time.perf_counter()], dtype=torch.float64)
    comm.all_reduce(came, "max")
    return float(came)


class InTurns:
    """Lets so many workers compute at a time. The others wait for a message, as they wait for the server in a run."""

    def __init__(self, comm: Comm, workers: int, at_once: int) -> None:
        self._comm, self._late = comm, comm.rank >= at_once
        self._to, self._source = (comm.rank + at_once) % workers, (comm.rank - at_once) % workers
        self._my_turn = not self._late

    def wait(self) -> None:
        """Let the next one compute, until it is this worker's turn again."""
        if self._my_turn:
            self._comm.isend(self._to, Message("turn")).wait()
        self._comm.recv(self._source)
        self._my_turn = True

    def end(self) -> None:
        """All have waited as often: those who had to wait at first owe a turn."""
        if self._late:
            self._comm.isend(self._to, Message("turn")).wait()


class Loop:
    """A rank's way to itself, through memory as messages between ranks go. What its other end does is not counted."""

    def __init__(self, watch: Watch) -> None:
        self._watch, patience = watch, Patience(60.0, crowded=False)
        block, pipes = Block.anonymous(post.nbytes(2)), [os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) for _ in range(2)]
        post.lay_out(block, 2, patience)
        ends = ([pipes[0][rank], pipes[1][1 - rank]] for rank in range(2))
        self._here, self._there = (post.Post(block, end, 2, rank, patience) for rank, end in enumerate(ends))

    def send(self, msg: Message) -> None:
        self._here.isend(1, msg)
        with self._watch.stopped():
            self._there.recv(0)

    def receive(self, msg: Message) -> Message:
        with self._watch.stopped():
            self._there.isend(0, msg)
        return self._here.recv(1)[1]


class Alone:
    """What a run needs of a communicator, for one rank: the others do as it does, and what it hears is made up."""

    def __init__(
        self, rank: int, size: int, workers: int, loop: Loop, made_up: Callable[[], tuple[int, Message]]
    ) -> None:
        self.rank, self.size, self._workers, self._loop, self._made_up = rank, size, workers, loop, made_up
        self.sent: Callable[[int, Message], None] = lambda to, msg: None

    def isend(self, to: int, msg: Message, tag: int = 0) -> Deferred:
        self.sent(to, msg)
        self._loop.send(msg)
        return Deferred(lambda: None)

    def recv(self, source: int = ANY, tag: int = 0, timeout: float | None = None) -> tuple[int, Message]:
        source, msg = self._made_up()
        return source, self._loop.receive(msg)

    def all_reduce(self, x: torch.Tensor, op: Op = "sum") -> None:
        if op == "sum":
            x *= self.size

    def broadcast(self, x: torch.Tensor, root: int = 0) -> None:
        pass

    def barrier(self) -> None:
        pass

    def split(self, color: int, key: int = 0) -> Alone:
        return Alone(0, 1 if color else self._workers, self._workers, self._loop, self._made_up)

    def counter(self, numbers: int = 1) -> Tickets:
        return Tickets(self.size)


class Tickets:
    """Numbers that all count up in turn."""

    def __init__(self, size: int) -> None:
        self._value, self._size = 0, size

    def take(self, count: int = 1, number: int = 0) -> int:
        before = self._value
        self._value += count * self._size
        return before

    def close(self) -> None:
        pass
