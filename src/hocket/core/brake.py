"""How a run is asked to stop: between two steps, and where workers keep in step, all after the same one."""

from __future__ import annotations

import threading
from collections.abc import Sequence

PATIENCE_S = 5.0
"""How long a rank that has given its promise waits for the word that must follow."""


class Brake:
    """One rank's brake. The starter pulls all of them at once, whatever the ranks are doing.

    Each rank promises a step that it will not go beyond without further word. The highest of these is a step that
    nobody has passed and everybody can reach, so that is where all stop.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._step = 0
        self._promised: int | None = None
        self._stop_after: int | None = None

    @property
    def pulled(self) -> bool:
        """Whether the run shall end; for workers that do not keep in step, that is all."""
        return self._promised is not None

    def promise(self) -> int:
        """The step that this rank will not go beyond before it hears `stop_after`."""
        with self._changed:
            if self._promised is None:
                self._promised = self._step + 1
            return self._promised

    def stop_after(self, step: int) -> None:
        with self._changed:
            self._stop_after = step
            self._changed.notify_all()

    def stops_after(self, step: int) -> bool:
        """To be asked after every step of a worker: whether it was the last."""
        with self._changed:
            self._step = step
            if self._promised is None or step < self._promised:
                return False
            self._changed.wait_for(lambda: self._stop_after is not None, PATIENCE_S)
            return self._stop_after is not None and step >= self._stop_after


def pull(brakes: Sequence[Brake]) -> None:
    """Ask all ranks of one process to stop."""
    last = max(brake.promise() for brake in brakes)
    for brake in brakes:
        brake.stop_after(last)
