"""SIGTERM and SIGHUP end a run as Ctrl-C does: its folder is finished, and its ranks go."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_ENDING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Interrupts:
    """While it lasts, the signals that ask a process to end raise KeyboardInterrupt in the main thread.

    With `pass_on`, whoever handled them before hears of the one that came afterwards: a process that would have died
    of it still does, only later.
    """

    def __init__(self, *, pass_on: bool = True) -> None:
        self._pass_on = pass_on
        self.number = 0
        """The last signal that came."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in _ENDING:
                if _is_ours(signal.getsignal(number)):
                    self._before[number] = signal.signal(number, self._raise)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._pass_on and self.number and self._before[self.number] is not signal.default_int_handler:
            signal.raise_signal(self.number)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        raise KeyboardInterrupt


def _is_ours(handler: Any) -> bool:
    """Whether a signal may be taken over: not one that is ignored (nohup), nor one with a handler of the user's."""
    known = (signal.SIG_DFL, signal.default_int_handler)
    return handler in known or isinstance(getattr(handler, "__self__", None), Interrupts)
