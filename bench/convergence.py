"""How well every strategy learns: test accuracy at its defaults, equal epochs for all, beside serial training.

    python bench/convergence.py TASK [SETTING=VALUE ...] [--engine sim] [--workers 4] [--jobs 1] [--seeds 3]
        [-s STRATEGY ...] [--sim KEY=VALUE ...]

Prints a row a strategy: the mean over the seeds, the smallest and the largest, and the difference to serial in points.
On `sim` one of the workers is 3 times slower than the others, unless a setting says otherwise.
"""

from __future__ import annotations

import argparse
import statistics
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from common import say_where  # before NumPy is loaded: it sets one BLAS thread

import hocket

STRATEGIES = (
    "allreduce", "local-sgd", "diloco", "gossip", "gossip:kind=sgp", "gossip:kind=pull", "gossip:kind=push",
    "gossip:kind=adpsgd", "server", "server:mode=ssp", "server:mode=dssp", "server:mode=async",
    "server:mode=async,push_every=4,fetch_every=4", "elastic", "elastic:order=round-robin", "mutex", "rwlock",
    "hogwild", "leashed",
)  # fmt: skip


def accuracy(job: tuple[str, dict[str, Any]]) -> float:
    task, settings = job
    result = hocket.fit(task, trace=0, progress=False, **settings)
    return result.test_metric or 0.0


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("task")
    options.add_argument("--engine", default="sim")
    options.add_argument("--workers", type=int, nargs="+", default=[4])
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--jobs", type=int, default=1, help="runs at a time")
    options.add_argument("-s", "--strategy", action="append")
    options.add_argument("--sim", action="append", default=[])
    options.add_argument("settings", nargs="*", help="such as epochs=20 or driver=compiled")
    chosen = options.parse_args()
    say_where()
    sim = dict(text.split("=", 1) for text in chosen.sim)
    settings: dict[str, Any] = {"driver": "pytorch", "engine": chosen.engine}
    settings |= dict(text.split("=", 1) for text in chosen.settings)
    rows = [("serial", 1)] + [(s, n) for s in chosen.strategy or STRATEGIES for n in chosen.workers]
    jobs = []
    for strategy, workers in rows:
        slow = {"stragglers": "1x3"} if chosen.engine == "sim" and workers > 1 else {}
        jobs += [
            (chosen.task, settings | dict(strategy=strategy, workers=workers, seed=seed, sim=slow | sim))
            for seed in range(chosen.seeds)
        ]
    with ProcessPoolExecutor(chosen.jobs) as pool:
        found = pool.map(accuracy, jobs)
        print(f"| strategy | workers | `{chosen.task}`, `{chosen.engine}` | from | to | to serial |\n|" + " --- |" * 6)
        serial = 0.0
        for strategy, workers in rows:
            runs = [next(found) for _ in range(chosen.seeds)]
            mean = statistics.mean(runs)
            serial = serial or mean
            print(
                f"| `{strategy}` | {workers} | {mean:.4f} | {min(runs):.4f} | {max(runs):.4f} "
                f"| {100 * (mean - serial):+.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
