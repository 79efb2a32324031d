"""What a rank does from when to when, for who draws a timeline."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Spans = Callable[[str], AbstractContextManager[object]]
"""Called with what is done inside the `with` statement that it is for."""

_NOTHING: AbstractContextManager[object] = nullcontext()


def unseen(_: str) -> AbstractContextManager[object]:
    """Nobody draws."""
    return _NOTHING
