"""Which workers of a parameter server may go on: stale-synchronous (Ho 2013), and with a dynamic slack (Zhao 2019)."""

from __future__ import annotations

import sys

from hocket.core.serving import Server
from hocket.core.state import State

ANY = sys.maxsize
"""A slack that nobody uses up."""


class Pace(State):
    """Who may go on, and who is too far ahead of the slowest.

    A worker may be `low` steps ahead, and up to `high` where that is foreseen to make it wait less.
    """

    pushes: list[int]
    last_s: list[float]
    interval_s: list[float]
    granted: list[int]

    def __init__(self, server: Server, low: int, high: int) -> None:
        n = server.workers
        super().__init__(pushes=[0] * n, last_s=[0.0] * n, interval_s=[0.0] * n, granted=[0] * n)
        self._server, self._low, self._high = server, low, high

    def pushed(self, worker: int, now_s: float) -> None:
        self.pushes[worker] += 1
        if self.pushes[worker] > 1:  # before the first there was the start
            self.interval_s[worker] = now_s - self.last_s[worker]
        self.last_s[worker] = now_s
        self._grant(worker)

    def may_go_on(self, worker: int) -> bool:
        if self.pushes[worker] <= self._low:  # it cannot be further ahead
            return True
        slowest = min((self.pushes[i] for i in self._server.active), default=ANY)
        return self.pushes[worker] <= max(slowest + self._low, self.granted[worker])

    def _grant(self, worker: int) -> None:
        """Let a worker that has used up the low slack take as many steps more as make it wait least (algorithm 2).

        The wait is foreseen from the last intervals between pushes: its own, and those of the slowest.
        """
        if self.pushes[worker] <= self._low:
            return
        slowest = min(self._server.active, key=lambda i: (self.pushes[i], self.last_s[i]))
        ahead = self.pushes[worker] - self.pushes[slowest]
        if ahead <= self._low or self.pushes[worker] <= self.granted[worker]:
            return
        own_s, slow_s = self.interval_s[worker], self.interval_s[slowest]
        if not own_s or not slow_s:  # nothing to foresee it from
            return

        def wait_s(more: int) -> float:
            """From the end of so many steps more to the next push of the slowest."""
            behind_s = self.last_s[slowest] - self.last_s[worker] - more * own_s
            return behind_s % slow_s

        more = min(range(self._high - ahead + 2), key=wait_s, default=0)
        self.granted[worker] = self.pushes[worker] - 1 + more
