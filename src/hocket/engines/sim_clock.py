"""The clock of a simulated rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from hocket.engines.sim import SimWorld

T = TypeVar("T")


class SimClock:
    """Virtual time of one rank."""

    def __init__(self, world: SimWorld, rank: int) -> None:
        self._world, self._rank = world, rank

    def now(self) -> float:
        if self._world.measured:
            self._world.settle(self._rank)
        return self._world.now_s[self._rank]

    def common(self, at: float) -> float:
        return at

    def charge(self, share: float, done: float = 1.0) -> None:
        self._world.charge(self._rank, share, done)

    @contextmanager
    def free(self) -> Iterator[None]:
        before = self._world.free[self._rank]
        self._world.settle(self._rank)
        self._world.free[self._rank] = True
        try:
            yield
        finally:
            self._world.free[self._rank] = before
            self._world.count_from_here(self._rank)

    paused = free

    def come_back(self, now_s: float, earliest_s: float, ranks: int) -> None:
        self._world.come_back(self._rank, now_s, ranks)

    def wait_while(self, busy: Callable[[], bool]) -> None:
        pass

    def line_up(self) -> None:
        self._world.line_up(self._rank)

    def state(self) -> dict[str, Any]:
        world = self._world
        drawn = [list(rng.getstate()[1]) for rng in (world.random[self._rank], world.tie_random)]
        return {"now_s": self.now(), "random": drawn, "gradients": world.gradients[self._rank]}

    def restore(self, state: dict[str, Any]) -> None:
        world = self._world
        world.now_s[self._rank] = max(state["now_s"], self.now())
        for rng, drawn in zip((world.random[self._rank], world.tie_random), state.get("random", ()), strict=False):
            rng.setstate((3, tuple(drawn), None))
        world.gradients[self._rank] = state.get("gradients", 0)


class SimTurns:
    """The turn of one rank among all."""

    def __init__(self, world: SimWorld, rank: int) -> None:
        self._world, self._rank = world, rank

    def common(self, make: Callable[[], T]) -> T:
        world = self._world
        if world.common is None:
            world.common = make()
        found: T = world.common
        return found

    def let_earlier_run(self) -> None:
        self._world.catch_up(self._rank)
