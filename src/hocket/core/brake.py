"""How a run is asked to pause between two steps: to be saved, or to end. Workers in step pause after the same one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Literal

Purpose = Literal["save", "stop"]

PATIENCE_S = 5.0
"""How long a rank that has given its promise waits for the word that must follow."""


class Brake:
    """One rank's brake. The starter pulls all of them at once, whatever the ranks are doing.

    Each rank promises a step that it will not go beyond without further word. The highest of these is a step that
    nobody has passed and everybody can reach, so that is where all pause.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked = False
        self._step = 0
        self._promised: int | None = None
        self._pause_after: int | None = None
        self.purpose: Purpose | None = None
        """Why it was pulled, if it was; workers that do not keep in step need to know no more."""
        self.on_stop: Callable[[], None] = lambda: None
        """Called when the run shall end, for workers that look at nothing else."""

    def promise(self, purpose: Purpose) -> int:
        """Pull it; returns the step that this rank will not go beyond before it hears `pause_after`."""
        with self._changed:
            self._asked = True  # before the step is looked at, as a worker does it the other way round
            if self._promised is None:
                self._promised = self._step + 1
            if self.purpose != "stop":
                self.purpose = purpose
            if purpose == "stop":
                self.on_stop()
            return self._promised

    def pause_after(self, step: int) -> None:
        with self._changed:
            self._pause_after = step
            self._changed.notify_all()

    def pauses_after(self, step: int) -> bool:
        """To be asked after every step of a worker: whether all pause here."""
        self._step = step
        if not self._asked:  # without the lock, which every step would have to take
            return False
        with self._changed:
            if self._promised is None or step < self._promised:
                return False
            self._changed.wait_for(lambda: self._pause_after is not None, PATIENCE_S)
            return self._pause_after is not None and step >= self._pause_after

    def passed(self, step: int) -> None:
        """For workers that do not keep in step, and look at `purpose` themselves: they are under way."""
        self._step = step

    def release(self) -> None:
        """The pause is over."""
        with self._changed:
            self._asked = False
            self._promised = self._pause_after = self.purpose = None


def pull(brakes: Sequence[Brake], purpose: Purpose) -> None:
    """Ask all ranks of one process to pause."""
    last = max(brake.promise(purpose) for brake in brakes)
    for brake in brakes:
        brake.pause_after(last)
