"""Many workers against one: all-reduce on mpi, mnist-mlp, batch 512 a worker.

`python bench/scaling.py [WORKERS ...]`, by default 1 and 2; the runs are interleaved.
"""

from __future__ import annotations

import statistics
import sys

import common  # noqa: F401 - sets one BLAS thread

import hocket

ROUNDS = 7


def samples_per_s(workers: int) -> float:
    result = hocket.fit(
        "mnist-mlp", strategy="allreduce", engine="mpi", workers=workers, batch=512, epochs=3, trace=0, progress=False
    )
    return result.samples_per_s


def main() -> None:
    counts = [int(word) for word in sys.argv[1:]] or [1, 2]
    found: dict[int, list[float]] = {n: [] for n in counts}
    for _ in range(ROUNDS):
        for n in counts:
            found[n].append(samples_per_s(n))
    base = statistics.median(found[counts[0]])
    print(f"workers   samples/s (median, from, to of {ROUNDS})   over {counts[0]} worker(s)")
    for n, values in found.items():
        middle = statistics.median(values)
        print(f"{n:7d}   {middle:,.0f}  {min(values):,.0f}  {max(values):,.0f}   {middle / base:.2f}")


if __name__ == "__main__":
    main()
