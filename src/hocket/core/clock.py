"""Time as a rank sees it: real on real engines, virtual in the simulator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

FORWARD = 1 / 3
"""The way there in a gradient's time, for a virtual clock: back, two products are computed where there it is one."""


class Clock(Protocol):
    """Training time of one rank, in seconds. Evaluation and bookkeeping happen while it is paused."""

    def now(self) -> float: ...

    def common(self, at: float) -> float:
        """A moment since the last pause, on a clock that all ranks of a host share and that no pause stops."""

    def charge(self, share: float, done: float = 1.0) -> None:
        """A gradient on `share` of a full batch is computed, or its way back as far as `done`: a virtual clock adds
        what that costs."""

    def paused(self) -> AbstractContextManager[None]:
        """Inside, time stands still."""

    def free(self) -> AbstractContextManager[None]:
        """Inside, a virtual clock charges nothing for messages: for what only measures the run."""

    def come_back(self, now_s: float, earliest_s: float, ranks: int) -> None:
        """The end of a pause that so many ranks made together, each from a time of its own: they go on as far apart
        as they came. This one came at `now_s`, the first at `earliest_s`."""

    def wait_while(self, busy: Callable[[], bool]) -> None:
        """Somebody measures the run: a real clock stands still until that is over, in virtual time it takes none."""

    def line_up(self) -> None:
        """After a barrier: virtual ranks go on in the order of their numbers, not of their coming."""

    def state(self) -> dict[str, Any]:
        """The time, and what a virtual clock draws its times from: to go on from there in another process."""

    def restore(self, state: dict[str, Any]) -> None: ...


_LOOK_AGAIN_S = 0.0005


class RealClock:
    """The wall clock, less the time spent paused."""

    def __init__(self) -> None:
        self._origin = time.perf_counter()
        self._paused = False

    def now(self) -> float:
        return time.perf_counter() - self._origin

    def common(self, at: float) -> float:
        return self._origin + at

    def charge(self, share: float, done: float = 1.0) -> None:
        pass

    @contextmanager
    def paused(self) -> Iterator[None]:
        if self._paused:
            yield
            return
        began, self._paused = time.perf_counter(), True
        try:
            yield
        finally:
            self._paused = False
            self._origin += time.perf_counter() - began

    def free(self) -> AbstractContextManager[None]:
        return nullcontext()

    def come_back(self, now_s: float, earliest_s: float, ranks: int) -> None:
        with self.paused():
            time.sleep(now_s - earliest_s)

    def wait_while(self, busy: Callable[[], bool]) -> None:
        with self.paused():
            while busy():
                time.sleep(_LOOK_AGAIN_S)

    def line_up(self) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {"now_s": self.now()}

    def restore(self, state: dict[str, Any]) -> None:
        self._origin = time.perf_counter() - state["now_s"]
