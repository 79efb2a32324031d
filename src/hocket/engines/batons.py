"""How the right to run goes from rank to rank where one runs at a time: between threads, or within one.

Handing over from thread to thread takes two wake-ups. Greenlets of one thread switch in a twentieth of that, and find
the caches warm; but what a thread has to itself, they share.
"""

from __future__ import annotations

import os
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

try:
    from greenlet import greenlet
except ImportError:  # there is no wheel for every Python and machine
    greenlet = None

Body = Callable[[int], None]
"""The life of a rank. It begins with `Batons.wait`."""


class Batons(ABC):
    """One a rank; who has it runs."""

    def __init__(self, size: int) -> None:
        self._size = size

    @abstractmethod
    def give(self, rank: int) -> None:
        """This rank runs next: when the one that gives waits, or ends."""

    @abstractmethod
    def wait(self, rank: int) -> None:
        """Until it is given to this rank, which asks."""

    @abstractmethod
    def carriers(self, body: Body) -> list[Callable[[], None]]:
        """What threads must be started for, so that every rank lives."""


class BetweenThreads(Batons):
    """A lock a rank."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._locks = [threading.Lock() for _ in range(size)]
        for lock in self._locks:
            lock.acquire()
        # Any core, so that simulations side by side do not crowd on one; the user's generator stays untouched.
        self._core = secrets.choice(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else 0

    def give(self, rank: int) -> None:
        self._locks[rank].release()

    def wait(self, rank: int) -> None:
        self._locks[rank].acquire()

    def carriers(self, body: Body) -> list[Callable[[], None]]:
        def live(rank: int) -> None:
            if hasattr(os, "sched_setaffinity"):
                # Only one of these threads runs at a time: on one core the next finds the caches warm.
                os.sched_setaffinity(0, {self._core})
            body(rank)

        return [partial(live, rank) for rank in range(self._size)]


class WithinOneThread(Batons):
    """A greenlet a rank."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._given: int | None = None
        self._greenlets: list[Any] = []

    def give(self, rank: int) -> None:
        self._given = rank

    def wait(self, rank: int) -> None:
        given = self._given
        if given is not None and given != rank:
            following = self._greenlets[given]
            if not following:  # who has not begun does so from below: it would lie deeper and deeper on the stack
                following = following.parent
            if _is_as_a_thread_begins():
                following.switch()
            else:
                with torch.inference_mode(False), torch.enable_grad(), _without_autocast():
                    following.switch()
        self._given = None

    def carriers(self, body: Body) -> list[Callable[[], None]]:
        def live() -> None:
            self._greenlets = [greenlet(partial(body, rank)) for rank in range(self._size)]
            while self._given is not None:  # where a rank begins, and comes back to when it ends
                self._greenlets[self._given].switch()

        return [live]


def _is_as_a_thread_begins() -> bool:
    """Whether PyTorch's settings of a thread are those of a new one: others must not leak from rank to rank."""
    # In inference mode no gradients are enabled; to ask for autocast device by device takes a microsecond
    return torch.is_grad_enabled() and not torch._C._is_any_autocast_enabled()


@contextmanager
def _without_autocast() -> Iterator[None]:
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def best_batons(size: int, *, may_share_a_thread: bool) -> Batons:
    return WithinOneThread(size) if may_share_a_thread and greenlet is not None else BetweenThreads(size)
