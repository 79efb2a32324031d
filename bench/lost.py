"""What HOGWILD! loses: in memory, by what its canary says there, and in the simulator at the same contention.

`python bench/lost.py [THREADS ...]`, by default 2. Each update adds 1 to its parameters, so what is missing in the end
was lost. In memory the workers are compiled, and the figures are means of ROUNDS rounds; `ran` is the share of the time
in which they had a core, as workers that take turns on one hardly ever meet. The simulator is given the same compute,
the speed of memory that the updates had, and its own window; beside it stands the window that the loss in memory
speaks for, in the time that a cache line takes.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import astuple, dataclass
from threading import Barrier, Thread
from typing import NamedTuple

import common  # noqa: F401 - sets one BLAS thread
import numpy as np
import torch

from hocket.core.comm import Rank
from hocket.core.sharing import Sharing
from hocket.engines.catalogue import Listener
from hocket.engines.sim import Sim
from hocket.kernels.arrays import Columns, Floats, Integers
from hocket.kernels.jit import kernel
from hocket.kernels.memory.atomics import monotonic_ns
from hocket.kernels.memory.updates import begin_together, close_write, open_write, publish, read_into
from hocket.kernels.memory.vector import MappedVector
from hocket.kernels.memory.words import NO_ROW

ROUNDS = 9


class Case(NamedTuple):
    """Vectors of `dim` parameters; each update changes all of them, or `touched` at random, after `compute_ns`. With
    `reads`, workers copy the vector before they compute, and that is in the update's time."""

    dim: int
    touched: int
    compute_ns: int
    updates: int
    reads: bool = False


CASES = [
    Case(1_000, 1_000, 1_000, 200_000),
    Case(1_000, 1_000, 10_000, 40_000),
    Case(100_000, 100_000, 20_000, 5_000),
    Case(100_000, 100_000, 200_000, 2_000),
    Case(1_000, 50, 1_000, 200_000),
    Case(1_000, 50, 10_000, 40_000),
]


@dataclass
class Found:
    cycle_ns: float
    update_ns: float
    lost: float
    canary: float
    ran: float = 1.0
    """The share of the time in which the worker that had least of it had a core."""


@kernel
def work(
    control: Integers, rows: Floats, w: int, case: Case, minus_one: Floats, at: Columns, seen: Floats
) -> tuple[int, int]:
    """Nanoseconds of all, and of the updates alone."""
    random = 12_345 + w
    begin_together(control)
    began = monotonic_ns()
    writing = 0
    for _ in range(case.updates):
        random = (random * 1_103_515_245 + 12_345) & 0x7FFFFFFF
        now = monotonic_ns()
        if case.reads:
            read_into(control, rows, w, seen, case.dim)
            writing += monotonic_ns() - now
            now = monotonic_ns()
        until = now + case.compute_ns // 2 + case.compute_ns * random // 0x7FFFFFFF
        while now < until:
            now = monotonic_ns()
        if case.touched == case.dim:
            publish(control, rows, w, NO_ROW, minus_one, 1.0, case.dim)
        else:
            row = open_write(control, rows, w, case.dim)
            first = random % (len(at) - case.touched)
            for k in range(first, first + case.touched):
                rows[row, at[k]] += np.float32(1)
            close_write(control, w, row)
        writing += monotonic_ns() - now
    return monotonic_ns() - began, writing


def in_memory(case: Case, workers: int) -> Found:
    vector = MappedVector.create(Sharing("hogwild", case.dim, workers), torch.zeros(case.dim))
    took, ran = np.zeros((workers, 2)), np.zeros(workers)
    start = Barrier(workers)

    def run(w: int) -> None:
        minus_one = np.full(case.dim, -1, np.float32)
        order = np.random.default_rng(w).permuted(np.tile(np.arange(case.dim, dtype=np.int32), 50))
        start.wait()
        busy = time.thread_time_ns()
        took[w] = work(vector.control, vector.rows, w, case, minus_one, order, np.empty(case.dim, np.float32))
        ran[w] = (time.thread_time_ns() - busy) / took[w, 0]

    threads = [Thread(target=run, args=(w,)) for w in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    x = torch.empty(case.dim)
    vector.snapshot(x)
    cycle_ns, update_ns = took.mean(0) / case.updates
    kept = float(x.double().sum()) / (workers * case.updates * case.touched)
    return Found(cycle_ns, update_ns, 1 - kept, vector.statistics().lost, float(ran.min()))


def simulated(case: Case, workers: int, real: Found) -> Found:
    """At the same contention: as many updates in a second, that take as long."""
    updates = 20_000 // workers

    def main(rank: Rank) -> tuple[torch.Tensor, float, float]:
        shared = rank.comm.share(Sharing("hogwild", case.dim, workers), torch.zeros(case.dim))
        chance = torch.Generator().manual_seed(rank.comm.rank)
        step = torch.full((case.dim,), -1.0)
        for _ in range(updates):
            if case.touched < case.dim:
                step.zero_()[torch.randperm(case.dim, generator=chance)[: case.touched]] = -1.0
            rank.clock.charge(1.0)
            shared.publish(step, 1.0)
        took_ns = rank.clock.now() * 1e9 / updates
        rank.comm.barrier()
        x = torch.empty(case.dim)
        shared.read(x)
        return x.double(), took_ns, shared.statistics().lost

    moved = 2 * (4 * case.dim if case.touched == case.dim else 64 * case.touched)
    compute_ns = max(real.cycle_ns - real.update_ns, 1.0)
    sim = Sim(
        compute=f"lognormal:{compute_ns / 1.04:.1f}ns:0.28", memory=f"{moved / real.update_ns:.6f}GB", latency="0s"
    )
    found = sim.run(main, workers, Listener())
    kept = float(found[0][0].sum()) / (workers * updates * case.touched)
    return Found(statistics.mean(f[1] for f in found), 0.0, 1 - kept, found[0][2])


def main() -> None:
    in_memory(Case(64, 64, 0, 10), 1), in_memory(Case(64, 8, 0, 10), 1)  # compile
    names = ["threads", "parameters", "changed", "between updates", "an update", "ran", "lost in memory", "its canary"]
    print("| " + " | ".join([*names, "window", "lost in `sim`"]) + " |\n| --- |" + " ---: |" * (len(names) + 1))
    for workers in [int(word) for word in sys.argv[1:]] or [2]:
        for case in CASES:
            rounds = [astuple(in_memory(case, workers)) for _ in range(ROUNDS)]
            real = Found(*(statistics.mean(column) for column in zip(*rounds, strict=True)))
            line_ns = real.update_ns / (case.dim / 16 if case.touched == case.dim else case.touched)
            met = real.lost * real.cycle_ns / (workers - 1) * case.dim / case.touched / line_ns
            sim = simulated(case, workers, real)
            between_us, update_us = (real.cycle_ns - real.update_ns) / 1e3, real.update_ns / 1e3
            print(
                f"| {workers} | {case.dim:,} | {case.touched:,} | {between_us:.2f} µs | {update_us:.2f} µs "
                f"| {real.ran:.0%} | {real.lost:.3%} | {real.canary:.3%} | {met:.1f} lines | {sim.lost:.3%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
