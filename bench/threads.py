"""Batches/s of the four shared-memory methods by the number of threads: `python bench/threads.py [THREADS ...]`.

The MNIST MLP, compiled workers; medians of 3 interleaved rounds.
"""

from __future__ import annotations

import statistics
import sys

from common import compare  # noqa: F401 - sets one BLAS thread before NumPy is loaded

import hocket

METHODS = ("mutex", "rwlock", "hogwild", "leashed", "hogwild:every=16")
EPOCHS = {512: 4, 64: 2, 16: 1}
ROUNDS = 3


def run(method: str, workers: int, batch: int) -> hocket.Result:
    return hocket.fit(
        "mnist-mlp", strategy=method, workers=workers, batch=batch, epochs=EPOCHS[batch], lr=0.01, progress=False
    )


if __name__ == "__main__":
    threads = [int(n) for n in sys.argv[1:]] or [1, 2]
    for batch in EPOCHS:
        found: dict[tuple[str, int], list[hocket.Result]] = {}
        for _ in range(ROUNDS):
            for workers in threads:
                for method in METHODS:
                    found.setdefault((method, workers), []).append(run(method, workers, batch))
        print(f"\nbatch {batch}: batches/s (mean staleness, in updates)", flush=True)
        print("| threads | " + " | ".join(METHODS) + " |\n| --- |" + " ---: |" * len(METHODS))
        for workers in threads:
            cells = []
            for method in METHODS:
                runs = found[method, workers]
                speed = statistics.median(r.samples_per_s / batch for r in runs)
                stale = statistics.median(r.staleness["mean"] for r in runs)
                cells.append(f"{speed:,.0f} ({stale:.1f})")
            print(f"| {workers} | " + " | ".join(cells) + " |", flush=True)
