"""The message-level ring against MPICH's own all-reduce: 16 MiB, 2 ranks."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common import Measured, compare, say_where

from hocket.core.collectives import native, ring
from hocket.core.comm import Rank
from hocket.engines.catalogue import Listener, Program, engine

FLOATS = 4 * 1024 * 1024


def both(rank: Rank, argument: dict[str, Any]) -> list[list[float]]:
    """Seconds of each, taking turns; both ranks run it."""
    x = torch.ones(FLOATS)
    found: list[list[float]] = [[], []]
    for _ in range(12):
        for which, reduce in enumerate((ring, native)):
            rank.comm.barrier()
            began = time.perf_counter()
            reduce(rank.comm, x)
            found[which].append(time.perf_counter() - began)
            x.fill_(1.0)
    return [seconds[2:] for seconds in found]


def main() -> None:
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # for the ranks to find this file
    found: list[list[list[float]]] = []

    def run() -> Measured:
        found.append(engine.make("mpi").run(Program("ring:both"), 2, Listener())[0])
        return Measured(statistics.median(found[-1][0]) * 1e3)

    say_where()
    compare("ring", run, "native", lambda: Measured(statistics.median(found[-1][1]) * 1e3), "ms")


if __name__ == "__main__":
    main()
