"""How long a rank may wait for others. Needs no PyTorch, so that the command line can say it at once."""

from __future__ import annotations

from hocket.core.errors import UserError

DEADLINE_S = 60.0
"""Unless the user says otherwise."""
LONGEST_S = 1e8
"""Three years; clocks that count nanoseconds overflow somewhat later."""


def check_deadline(seconds: float) -> None:
    if not 0 < seconds <= LONGEST_S:
        raise UserError(f"deadline must be greater than 0 and at most {LONGEST_S:g} seconds, got {seconds:g}")
