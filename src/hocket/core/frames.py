"""Which lines of a traceback are the user's."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

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
