"""Programs whose ranks die, raise or never arrive."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import torch

from hocket.core.comm import Rank
from hocket.core.message import Message


def raises(rank: Rank, argument: dict[str, Any]) -> None:
    """Rank 1 raises while the others wait for it."""
    rank.status.operation = "compute"
    if rank.comm.rank == 1:
        raise ZeroDivisionError("planted")
    rank.comm.all_reduce(torch.ones(3))


def dies(rank: Rank, argument: dict[str, Any]) -> None:
    """Rank 1's process is killed in the middle of the work."""
    for step in range(100):
        rank.status.step = step
        rank.comm.all_reduce(torch.ones(1000))
        if step == 50 and rank.comm.rank == 1:
            time.sleep(0.5)  # for its last status to arrive
            os.kill(os.getpid(), signal.SIGKILL)


def never_arrives(rank: Rank, argument: dict[str, Any]) -> None:
    """Rank 1 does not come to the meeting."""
    if rank.comm.rank == 1:
        threading.Event().wait(300)
    if argument["operation"] == "recv":
        rank.comm.recv(1)
    else:
        rank.comm.all_reduce(torch.ones(3))


def deadlock(rank: Rank, argument: dict[str, Any]) -> None:
    """Everyone waits for the left neighbour, and nobody sends first."""
    left = (rank.comm.rank - 1) % rank.comm.size
    _, msg = rank.comm.recv(left, tag=4)
    rank.comm.send(left, msg)


def waits_in_vain(rank: Rank, argument: dict[str, Any]) -> str:
    """A receive with a time-out of its own gives up, and the run goes on."""
    outcome = ""
    if rank.comm.rank == 0:
        try:
            rank.comm.recv(1, tag=9, timeout=0.2)
        except TimeoutError:
            outcome = "timed out"
    else:
        rank.comm.send(0, Message("other tag"), tag=8)
    rank.comm.barrier()
    return outcome
