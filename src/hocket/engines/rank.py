"""What a started process runs: `python -m hocket.engines.rank`."""

from __future__ import annotations

import json
import os
import sys

from hocket.engines.base import Program
from hocket.engines.processes import PROGRAM, run_started


def main() -> int:
    start = json.loads(os.environ[PROGRAM])
    program = Program(start["function"], start["argument"])
    if start["engine"] == "mpi":
        from hocket.engines import mpi

        return run_started(mpi.rank_from_environment(), lambda: mpi.connect(start["deadline"]), program)
    from hocket.engines import torch as torch_engine

    number = int(os.environ["RANK"])
    return run_started(number, lambda: torch_engine.connect(start["deadline"]), program)


if __name__ == "__main__":
    status = main()
    if status:
        # A failed rank must not wait in MPI_Finalize for ranks that wait for it.
        sys.stderr.flush()
        os._exit(status)
