"""Many workers against one: all-reduce on mpi, mnist-mlp, batch 512 a worker.

`python bench/scaling.py [WORKERS ...]`, by default 1 and 2; the runs are interleaved.
"""

from __future__ import annotations

import statistics
import sys

from common import Measured, say_where, shown, speed_of

import hocket

ROUNDS = 7


def samples_per_s(workers: int) -> Measured:
    result = hocket.fit(
        "mnist-mlp", strategy="allreduce", engine="mpi", workers=workers, batch=512, epochs=3, trace=0, progress=False
    )
    return speed_of(result)


def main() -> None:
    say_where()
    counts = [int(word) for word in sys.argv[1:]] or [1, 2]
    found: dict[int, list[Measured]] = {n: [] for n in counts}
    for _ in range(ROUNDS):
        for n in counts:
            found[n].append(samples_per_s(n))
    base = statistics.median(run.value for run in found[counts[0]])
    for n, runs in found.items():
        over = statistics.median(run.value for run in runs) / base
        print(f"{n} workers: {shown(runs, ',.0f')} samples/s, {over:.2f} times {counts[0]}")


if __name__ == "__main__":
    main()
