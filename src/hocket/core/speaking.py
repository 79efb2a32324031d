"""Which rank speaks of a failure where a launcher that is not ours started them."""

from __future__ import annotations

import time

from hocket.core.errors import CommError

TURN_S = 0.5
"""How long a rank gives the one before it to speak, and to end all."""


def await_turn(number: int, error: BaseException) -> None:
    """Ranks of a launcher that is not ours mostly fail alike, and the first that speaks ends the others. Let it be the
    lowest, and not one that only tells of another's end. Nobody waits for a word, so nobody waits for ever."""
    time.sleep(TURN_S * (min(number, 3) + 4 * isinstance(error, CommError)))
