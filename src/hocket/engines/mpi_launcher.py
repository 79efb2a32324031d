"""Which program starts MPI's ranks, and what it says of itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from hocket.core.errors import UserError
from hocket.kernels.memory import block

_SHARED_A_RANK = 1_500_000
"""Bytes that MPICH (1.1 MB) and we take of shared memory for each rank, at the least. MPICH does not look whether they
are there, and its ranks die of SIGBUS."""
BESIDE = Path(sys.executable).parent / "mpiexec"
_NAMES = re.compile(r"\bMPI\b|HYDRA|OpenRTE|PRRTE|mpiexec|slurm", re.IGNORECASE)
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(:[0-9]+)?")  # a leading dash would reach ssh as an option


def find(wanted: str) -> str:
    """The launcher that is named here or in $HOCKET_MPIEXEC, the one beside this Python, or the first on the PATH."""
    chosen = wanted or os.environ.get("HOCKET_MPIEXEC", "")
    found = shutil.which(chosen) if chosen else str(BESIDE) if BESIDE.exists() else shutil.which("mpiexec")
    if found is None:
        raise UserError(
            f"engine mpi: cannot find {chosen or 'mpiexec'}, or may not run it; install one with "
            f"'pip install mpich', name one with --mpiexec, or use --engine threads"
        )
    if not _NAMES.search(_version(found)):
        raise UserError(f"engine mpi: {found} is no MPI launcher; name one with --mpiexec, like /usr/bin/mpiexec")
    return found


def slots(hosts: str) -> int:
    """How many ranks `a:4,b:4` has room for."""
    total = 0
    for host in filter(None, hosts.split(",")):
        if not _HOST.fullmatch(host):
            raise UserError(f"hosts: cannot read {host!r}; write machines and their slots like a:4,b:4")
        total += int(host.partition(":")[2] or 1)
    return total


@cache
def _version(launcher: str) -> str:
    """What the launcher says of itself; nothing if it cannot be asked."""
    try:
        done = subprocess.run(
            [launcher, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def check_shared_memory(size: int) -> None:
    """Refuse more ranks than MPICH finds memory for."""
    wanted, there_are = size * _SHARED_A_RANK, block.free()
    if wanted > there_are:
        raise UserError(
            f"engine mpi: {size} ranks want {wanted / 1e6:.1f} MB of shared memory, and {block.place()} has "
            f"{there_are / 1e6:.1f} MB free; give a container more (docker run --shm-size), or use --engine torch"
        )


def is_mpich(launcher: str) -> bool:
    return "HYDRA" in _version(launcher)


def is_exposed(launcher: str) -> bool:
    """Whether it listens on all interfaces for ranks on one machine too, whatever it is told: Open MPI 5."""
    found = re.search(r"\(Open MPI\) (\d+)", _version(launcher))
    return "PRRTE" in _version(launcher) or (found is not None and int(found[1]) >= 5)


def is_open_mpi(launcher: str) -> bool:
    return any(name in _version(launcher) for name in ("Open MPI", "OpenRTE", "open-mpi", "PRRTE"))
