"""All-reduce alone: through memory, as Hocket has it, against MPI's blocking call and against Gloo; float32 sums.

`python bench/allreduce.py [RANKS ...]`, by default 2, 3 and 5; within a run the ways take turns.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import say_where

from hocket.core.comm import Rank
from hocket.engines.catalogue import Listener, Program, engine

SIZES = {"4 KiB": 4096, "0.5 MiB": 1 << 19, "16 MiB": 1 << 24}
ROUNDS = 9


def ways(rank: Rank, library: str) -> dict[str, Callable[[torch.Tensor], object]]:
    found: dict[str, Callable[[torch.Tensor], object]] = {"memory": rank.comm.all_reduce}
    if library == "mpi":
        from mpi4py import MPI

        found["MPI, blocking"] = lambda x: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x.numpy())
        found["MPI, polled"] = rank.comm.native.all_reduce
    else:
        found["Gloo"] = rank.comm.native.all_reduce
    return found


def measure(rank: Rank, argument: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Microseconds of one all-reduce, by size and way: means of many in a row, several rounds."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, nbytes in SIZES.items():
        x = torch.zeros(nbytes // 4)
        times = max(3, min(200, (1 << 24) // nbytes))
        found[name] = {way: [] for way in ways(rank, argument["library"])}
        for _ in range(ROUNDS + 1):
            for way, reduce in ways(rank, argument["library"]).items():
                rank.comm.barrier()
                began = time.perf_counter()
                for _ in range(times):
                    reduce(x)
                found[name][way].append((time.perf_counter() - began) / times * 1e6)
    return {name: {way: us[1:] for way, us in by_way.items()} for name, by_way in found.items()}


def main() -> None:
    here = str(Path(__file__).parent)  # for the ranks to find this file
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    say_where()
    for size in [int(word) for word in sys.argv[1:]] or [2, 3, 5]:
        for library in ("mpi", "torch"):
            program = Program("allreduce:measure", {"library": library})
            found = engine.make(library).run(program, size, Listener())[0]
            for name, by_way in found.items():
                median = {way: statistics.median(us) for way, us in by_way.items()}
                for way, us in by_way.items():
                    spread = f"{median[way]:,.1f} (from {min(us):,.1f} to {max(us):,.1f}) us"
                    ratio = median["memory"] / median[way]
                    print(f"{size} ranks, {name}, {way}: {spread}; memory takes {ratio:.2f} of it", flush=True)


if __name__ == "__main__":
    main()
