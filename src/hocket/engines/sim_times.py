"""Times of steps that somebody measured, for the simulator to play back.

A file has a line for each worker, with the times of its steps in order. They keep what no draw does: a core that is
slow for long, a bad moment that lasts for some steps, and one that all workers had at once.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from functools import lru_cache

from hocket.core.errors import UserError, shown
from hocket.core.units import seconds

PREFIX = "times:"

Lines = tuple[tuple[float, ...], ...]


def played(text: str, rank: int, seed: int) -> Callable[[int], float] | None:
    """The seconds of a rank's nth gradient, where they are played back."""
    if not text.startswith(PREFIX):
        return None
    lines = lines_of(text.removeprefix(PREFIX))
    line = lines[rank % len(lines)]
    # One moment for all: workers that were measured together are played back together
    begin = int(random.Random(f"{seed}/times").random() * len(line))
    return lambda n: line[(begin + n) % len(line)]


def lines_of(path: str) -> Lines:
    try:
        about = os.stat(path)
        return _read(path, about.st_mtime_ns, about.st_size)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"compute: cannot read {_named(path)}: {error.strerror}") from None
    except ValueError:
        raise UserError(f"compute: {_named(path)} is no text with a line of times for each worker") from None


@lru_cache(4)
def _read(path: str, changed_ns: int, nbytes: int) -> Lines:
    """Read once for all ranks, and again when the file is another."""
    found = []
    with open(path, encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            words = re.split(r"[\s,;]+", line.partition("#")[0].strip(" \t\r\n,;"))
            if words != [""]:
                found.append(tuple(seconds(word, f"compute: line {number} of {_named(path)}") for word in words))
    if not found:
        raise UserError(f"compute: {_named(path)} has no times; write a line for each worker, such as 1.2ms 1.3ms")
    return tuple(found)


def _named(path: str) -> str:
    return shown(os.path.basename(path) or path)
