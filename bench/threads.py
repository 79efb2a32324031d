"""Batches/s of the four shared-memory methods by the number of threads: `python bench/threads.py [THREADS ...]`.

The MNIST MLP, compiled workers; medians of 3 interleaved rounds.
"""

from __future__ import annotations

import statistics
import sys
from functools import partial

from common import say_where, speed_of, undisturbed  # before NumPy is loaded: it sets one BLAS thread

import hocket

METHODS = ("mutex", "rwlock", "hogwild", "leashed", "hogwild:every=16")
EPOCHS = {512: 4, 64: 2, 16: 1}
ROUNDS = 3


def run(method: str, workers: int, batch: int) -> hocket.Result:
    return hocket.fit(
        "mnist-mlp", strategy=method, workers=workers, batch=batch, epochs=EPOCHS[batch], lr=0.01, progress=False
    )


if __name__ == "__main__":
    say_where()
    threads = [int(n) for n in sys.argv[1:]] or [1, 2]
    for batch in EPOCHS:
        found: dict[tuple[str, int], list[hocket.Result]] = {}
        for _ in range(ROUNDS):
            for workers in threads:
                for method in METHODS:
                    found.setdefault((method, workers), []).append(undisturbed(partial(run, method, workers, batch)))
        print(f"\nbatch {batch}: batches/s (mean staleness, in updates; test accuracy)", flush=True)
        print("| threads | " + " | ".join(METHODS) + " |\n| --- |" + " ---: |" * len(METHODS))
        for workers in threads:
            cells = []
            for method in METHODS:
                runs = found[method, workers]
                diverged = sum(r.samples_per_s is None for r in runs)
                if diverged:
                    cells.append(f"{diverged} of {len(runs)} diverged")
                    continue
                speed, accuracy = (statistics.median(column) for column in zip(*map(speed_of, runs), strict=True))
                stale = statistics.median(r.staleness["mean"] for r in runs)
                cells.append(f"{speed / batch:,.0f} ({stale:.1f}; {accuracy:.3f})")
            print(f"| {workers} | " + " | ".join(cells) + " |", flush=True)
