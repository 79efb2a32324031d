"""Which core each rank is tied to: one of its own where there are enough, or none."""

from __future__ import annotations

import os
import time
from collections.abc import Set
from typing import Literal

from hocket.core.errors import UserError

Bind = Literal["auto", "none", "core"]
"""`core` ties every rank to a core; `auto` does so if as many cores are idle as there are ranks."""

WATCH_S = 0.06
"""How long to look which cores are idle; the kernel counts in hundredths of a second."""


def allowed_cores() -> frozenset[int]:
    """Those that the calling thread may use."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def tie_to(cores: Set[int]) -> None:
    """Let the calling thread run on these alone."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def check_binding(how: Bind, size: int) -> None:
    """Refuse to bind more ranks than there are cores."""
    cores = len(allowed_cores())
    if how == "core" and size > cores:
        raise UserError(f"--bind core: {size} ranks need {size} cores, and there are {cores}; use --bind none")


def chosen_cores(how: Bind, size: int) -> list[int]:
    """The core of each rank, the idlest ones; empty if they are to run where the kernel puts them."""
    allowed = sorted(allowed_cores())
    if how == "none" or size > len(allowed) or (how == "auto" and size == 1):
        return []
    busy = _busy_shares(WATCH_S)
    cores = sorted(sorted(allowed, key=lambda core: busy.get(core, 0.0))[:size])
    if how == "auto" and any(busy.get(core, 1.0) > 0.5 for core in cores):
        return []
    return cores


def _busy_shares(watch_s: float) -> dict[int, float]:
    """The share of the next moment in which each core has something to do."""
    before = _times()
    time.sleep(watch_s)
    shares = {}
    for core, (idle, total) in _times().items():
        idle_before, total_before = before.get(core, (0, 0))
        shares[core] = 1 - (idle - idle_before) / max(total - total_before, 1)
    return shares


def _times() -> dict[int, tuple[int, int]]:
    """Ticks that each core was idle, and in all."""
    found = {}
    try:
        with open("/proc/stat") as lines:
            for line in lines:
                name, *fields = line.split()
                if name.startswith("cpu") and name != "cpu":
                    ticks = [int(field) for field in fields[:8]]
                    found[int(name[3:])] = (ticks[3] + ticks[4], sum(ticks))
    except OSError:
        pass  # nobody counts here: no core is known to be idle
    return found


def bind_to(cores: list[int], rank: int) -> None:
    """Tie this process to its core, before it has threads or memory: these follow."""
    if cores:
        tie_to({cores[rank]})
