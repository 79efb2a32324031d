"""What a started process runs: `python -m hocket.engines.started`. It reports for duty before it loads PyTorch."""

from __future__ import annotations

import json
import os
import sys

from hocket.core.environment import CONTROL, PROGRAM, launched_rank
from hocket.core.status import Status
from hocket.engines.line import Link


def main() -> int:
    start = json.loads(os.environ[PROGRAM])
    status = Status(operation="import")
    link = Link(os.environ[CONTROL], launched_rank(), status)
    # A rank without its starter has nobody to work for: end at once, even inside a long computation.
    link.start(on_lost=lambda: os._exit(1))

    from hocket.engines.processes import run_started

    return run_started(link, start)


if __name__ == "__main__":
    exit_status = main()
    if exit_status:
        # A failed rank must not wait in MPI_Finalize for ranks that wait for it.
        sys.stderr.flush()
        os._exit(exit_status)
