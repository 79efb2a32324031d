"""One clock for ranks on several hosts: how far each is ahead of rank 0's, found once by a few messages."""

from __future__ import annotations

import uuid
from pathlib import Path

import torch

from hocket.core.clock import Clock
from hocket.core.comm import Comm
from hocket.core.message import Message

PINGS = 20
"""Questions a rank asks; the one that was answered fastest tells most."""
_TAG = 7003  # apart from a strategy's messages


def ahead_s(comm: Comm, clock: Clock, host: int | None = None) -> float:
    """How far this rank's shared clock is ahead of rank 0's; 0 where all are on one host. All ranks call it together.

    Off by half of what the way there and the way back differ, at most by half of the fastest answer.
    """
    mine = _this_host() if host is None else host
    least = torch.tensor([mine, -mine])
    comm.all_reduce(least, "min")
    if int(least[0]) == -int(least[1]):
        return 0.0
    if comm.rank:
        return _ask(comm, clock)
    for other in range(1, comm.size):
        for _ in range(PINGS):
            comm.recv(other, _TAG)
            comm.send(other, Message("now", (), (torch.tensor(_now(clock), dtype=torch.float64),)), _TAG)
    return 0.0


def _ask(comm: Comm, clock: Clock) -> float:
    answers = []
    for _ in range(PINGS):
        asked_s = _now(clock)
        comm.send(0, Message("what time is it"), _TAG)
        theirs_s = float(comm.recv(0, _TAG)[1].tensors[0])
        heard_s = _now(clock)
        answers.append((heard_s - asked_s, (asked_s + heard_s) / 2 - theirs_s))
    return min(answers)[1]


def _now(clock: Clock) -> float:
    return clock.common(clock.now())


def _this_host() -> int:
    """A number of the running kernel: containers on one have one clock, whatever they are called."""
    try:
        return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).int >> 65
    except (OSError, ValueError):
        return uuid.getnode()
