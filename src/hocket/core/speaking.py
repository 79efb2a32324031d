"""Which rank speaks of a failure where a launcher that is not ours started them, and how all end."""

from __future__ import annotations

import time
from collections.abc import Callable

from hocket.core.errors import CommError, UserError

TURN_S = 0.5
"""How long a rank gives the one before it to speak, and to end all."""
PASS_ON_S = 0.2
"""For the launcher to pass on what a rank has said before everything ends."""
Abort = Callable[[int], None]
"""Ends all ranks, with an exit status."""


def await_turn(number: int, error: BaseException) -> None:
    """Ranks of a launcher that is not ours mostly fail alike, and the first that speaks ends the others. Let it be the
    lowest, and not one that only tells of another's end. Nobody waits for a word, so nobody waits for ever."""
    time.sleep(TURN_S * (min(number, 3) + 4 * isinstance(error, CommError)))


def exit_status(error: BaseException) -> int:
    return 2 if isinstance(error, UserError) else 1
