"""A limit to how long ranks that a launcher started may take to find each other."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from hocket.core.errors import DeadlineExceeded
from hocket.core.speaking import await_turn, exit_status
from hocket.engines.pmi import end_all


def never_met(rank: int, size: int, limit_s: float) -> DeadlineExceeded:
    """What a rank says that waited for others in vain."""
    return DeadlineExceeded(rank, "the first meeting", f"all {size} ranks (has one ended before it?)", limit_s)


@contextmanager
def limited(rank: int, size: int, limit_s: float) -> Iterator[None]:
    """End this rank, and with it all, if what is done inside takes longer.

    MPI_Init waits for every rank without a limit, and holds the interpreter meanwhile; so a child looks at the clock.
    """
    ended, still_inside = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.close(still_inside)
            if not select.select([ended], [], [], limit_s)[0]:
                error = never_met(rank, size, limit_s)
                await_turn(rank, error)
                os.write(2, f"hocket: {error}\n".encode())
                end_all(exit_status(error))
                os.kill(os.getppid(), signal.SIGKILL)
        finally:
            os._exit(0)
    os.close(ended)
    try:
        yield
    finally:
        os.close(still_inside)
        os.waitpid(child, 0)
