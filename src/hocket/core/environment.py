"""What launchers leave in a process's environment."""

from __future__ import annotations

import os

CONTROL = "HOCKET_CONTROL"
"""`host:port:token` of the process that started this rank."""
PROGRAM = "HOCKET_PROGRAM"
"""What this rank is to run, as JSON."""

_MPI_RANK = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
_MPI_SIZE = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS")


def inside_mpi() -> bool:
    """Whether mpiexec or srun started this process, and not Hocket."""
    return CONTROL not in os.environ and any(name in os.environ for name in _MPI_RANK)


def inside_torchrun() -> bool:
    """Whether torchrun started this process."""
    return CONTROL not in os.environ and "TORCHELASTIC_RUN_ID" in os.environ


def launched_rank() -> int:
    """This process's rank, before any library is loaded; 0 without a launcher."""
    names = ("RANK",) if "WORLD_SIZE" in os.environ else _MPI_RANK
    return next((int(os.environ[name]) for name in names if name in os.environ), 0)


def launched_size() -> int | None:
    """How many ranks mpiexec, srun or torchrun started; None without one."""
    names = ("WORLD_SIZE",) if inside_torchrun() else _MPI_SIZE if inside_mpi() else ()
    return next((int(os.environ[name]) for name in names if name in os.environ), None)
