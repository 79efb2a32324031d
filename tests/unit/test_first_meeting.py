"""Ranks of mpiexec wait for each other in MPI_Init, which knows no deadline."""

from __future__ import annotations

import signal
import subprocess
import sys

WAITS = """
import time
from hocket.engines.first_meeting import limited
with limited(1, 3, 30.0):
    print("met", flush=True)
with limited(0, 3, 0.2):
    time.sleep(60)
"""


def test_a_rank_that_waits_in_vain_ends_with_a_line() -> None:
    done = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True, timeout=50)
    assert done.stdout == "met\n" and done.returncode == -signal.SIGKILL
    assert done.stderr.startswith("hocket: rank 0 waited 0.2 s in the first meeting for all 3 ranks (has one ended")
    assert done.stderr.count("\n") == 1
