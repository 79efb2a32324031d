"""The brakes of ranks that are processes: pulled over the control line."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from hocket.core.brake import Brake, Purpose
from hocket.engines.line import Control, Link


class Brakes:
    """The starter's end: asks every rank how far it will go at most, and lets all go as far as the farthest."""

    def __init__(self, control: Control, size: int) -> None:
        self._control, self._size = control, size
        self._promises: dict[int, int] = {}

    def pull(self, purpose: Purpose) -> None:
        self._promises.clear()
        for rank in range(self._size):
            self._control.tell(rank, "brake", {"purpose": purpose})

    def promised(self, rank: int, step: int) -> None:
        self._promises[rank] = step

    def release(self, done: Collection[int]) -> int | None:
        """When all but those who are done have answered, tell them where to pause; returns that step."""
        if not self._promises or self._promises.keys() | set(done) < set(range(self._size)):
            return None
        farthest = max(self._promises.values())
        for rank in self._promises:
            self._control.tell(rank, "pause", {"step": farthest})
        return farthest


def hearing(link: Link, brake: Brake) -> Callable[[str, dict[str, Any]], None]:
    """A rank's end: answers at once, whatever the rank is doing."""

    def hear(kind: str, data: dict[str, Any]) -> None:
        match kind:
            case "brake":
                link.tell("promise", {"step": brake.promise(data["purpose"])})
            case "pause":
                brake.pause_after(data["step"])

    return hear
