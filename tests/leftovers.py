"""What runs leave in /dev/shm: nothing, once they have ended."""

from __future__ import annotations

import time
from pathlib import Path


def segments() -> set[Path]:
    """All of Hocket's that are there now: of tests beside this one too."""
    return set(Path("/dev/shm").glob("hocket-*"))


def vanish(found: set[Path], limit_s: float = 60) -> bool:
    """Whether they go, which those of other tests do soon: nobody but a run that is still going on may need them."""
    limit = time.monotonic() + limit_s
    while found & segments() and time.monotonic() < limit:
        time.sleep(0.05)
    return not found & segments()
