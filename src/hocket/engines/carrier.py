"""A thread beside the one that computes: what is handed to it goes on meanwhile."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue


class Carried:
    """A request that the carrier sees to."""

    def __init__(self, operation: Callable[[], None]) -> None:
        self._operation = operation
        self._over = threading.Event()
        self._error: BaseException | None = None
        self.ended_s = 0.0

    def carry(self) -> None:
        """On the carrier's thread."""
        try:
            self._operation()
        except BaseException as error:  # it is told to who waits
            self._error = error
        self.ended_s = time.perf_counter()
        self._over.set()

    def wait(self) -> None:
        self._over.wait()  # the operation has a deadline of its own
        if self._error is not None:
            raise self._error


class Carrier:
    """Does one operation after the other, in the order in which they come. Its thread ends with it."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Carried | None] = SimpleQueue()
        threading.Thread(target=_carry_all, args=(self._queue,), name="carrier", daemon=True).start()
        weakref.finalize(self, self._queue.put, None)

    def start(self, operation: Callable[[], None]) -> Carried:
        carried = Carried(operation)
        self._queue.put(carried)
        return carried


def _carry_all(queue: SimpleQueue[Carried | None]) -> None:
    while (carried := queue.get()) is not None:
        carried.carry()
        del carried  # so that what it holds lives no longer than who waits for it
