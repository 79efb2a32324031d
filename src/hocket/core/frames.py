"""Which lines of a traceback are the user's, and what a rank says of an error."""

from __future__ import annotations

import re
import sysconfig
import traceback
from pathlib import Path

from hocket.core.errors import CommError, UserError, named

_FRAME = re.compile(r'^  File "(?P<file>.+)", line \d+')
_NOT_USERS = (str(Path(__file__).parents[1]), *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


def users_frames(text: str) -> str:
    """The frames of a formatted traceback that are neither Hocket's nor a library's: of the last error, if several."""
    kept: list[str] = []
    keep = False
    for line in text.rpartition("Traceback (most recent call last):\n")[2].splitlines():
        if found := _FRAME.match(line):
            keep = not found["file"].startswith(("<", *_NOT_USERS))
        elif not line.startswith("    "):
            keep = False
        if keep:
            kept.append(line)
    return "\n".join(kept)


def why(error: BaseException, rank: int, operation: str) -> str:
    """What a rank says under a launcher that is not Hocket's: one line for a mistake or a signal, with the user's own
    lines where there are any; a traceback of ours only for what is our fault."""
    if isinstance(error, UserError):
        return f"rank {rank}: {error}"
    if isinstance(error, KeyboardInterrupt):
        return f"rank {rank} was interrupted in {operation}"
    text = "".join(traceback.format_exception(error))
    shown = users_frames(text) or ("" if isinstance(error, CommError) else text)
    return f"rank {rank} failed in {operation}: {named(error)}\n{shown}".rstrip()
