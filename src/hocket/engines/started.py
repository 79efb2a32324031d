"""What a started process runs: `python -m hocket.engines.started`. It reports for duty before it loads PyTorch."""

from __future__ import annotations

import json
import os
import signal
import sys

from hocket.core.brake import Brake
from hocket.core.environment import CONTROL, PROGRAM, launched_rank
from hocket.core.status import Status
from hocket.engines.binding import bind_to
from hocket.engines.brakes import hearing
from hocket.engines.guard import die_with_parent
from hocket.engines.line import Link


def main() -> int:
    die_with_parent()
    _leave_signals_to_the_starter()
    start = json.loads(os.environ[PROGRAM])
    bind_to(start["cores"], launched_rank())
    status, brake = Status(operation="import"), Brake()
    link = Link(os.environ[CONTROL], launched_rank(), status)

    # A rank without its starter has nobody to work for: end at once, even inside a long computation.
    link.start(on_lost=lambda: os._exit(1), hear=hearing(link, brake))

    from hocket.engines.processes import run_started

    return run_started(link, start, brake)


def _leave_signals_to_the_starter() -> None:
    """A batch system signals every process of a job; the starter then lets all ranks finish a step together.

    Children that the user's code forks are ended by these signals as ever.
    """
    numbers = (signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    os.register_at_fork(after_in_child=lambda: [signal.signal(number, signal.SIG_DFL) for number in numbers])


if __name__ == "__main__":
    exit_status = main()
    if exit_status:
        # A failed rank must not wait in MPI_Finalize for ranks that wait for it.
        sys.stderr.flush()
        os._exit(exit_status)
