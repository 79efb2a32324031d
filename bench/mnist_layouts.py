"""The MNIST study: one SGD with batches of 64, serial, data-parallel and model-parallel, as a table.

`python bench/mnist_layouts.py [TASK] [TARGET] [ROUNDS]`: every way trains until the test accuracy is there; rounds are
interleaved, and medians shown.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from common import say_where

import hocket

BATCH = 64
WAYS: list[tuple[str, int, dict[str, Any]]] = [("serial", 1, {"strategy": "serial", "workers": 1, "batch": BATCH})]
for ranks in (2, 4):
    WAYS += [
        ("data", ranks, {"workers": ranks, "batch": BATCH // ranks}),
        (f"tensor={ranks}", ranks, {"layout": f"tensor={ranks}", "batch": BATCH}),
        (f"pipeline={ranks}", ranks, {"layout": f"pipeline={ranks},microbatches=4", "batch": BATCH}),
    ]


def main() -> None:
    task, target, rounds = (*sys.argv[1:], *("mnist-mlp", "0.97", "1")[len(sys.argv) - 1 :])
    say_where()
    found: dict[tuple[str, int], list[hocket.Result]] = {}
    for _ in range(int(rounds)):
        for name, ranks, settings in WAYS:
            result = hocket.fit(
                task, engine="mpi", target=float(target), evaluate_every=0.25, epochs=5, progress=False, **settings
            )
            found.setdefault((name, ranks), []).append(result)
            print(f"# {name} on {ranks}: {result.samples_per_s:,.0f} samples/s, {result.epochs:.2f} epochs", flush=True)
    print(f"\n| {task} | ranks | samples/s | s to {target} | epochs to {target} | bytes a sample |")
    print("| --- | --- | --- | --- | --- | --- |")
    for (name, ranks), results in found.items():
        speed = statistics.median(result.samples_per_s or 0.0 for result in results)
        seconds = [result.time_to_target for result in results if result.time_to_target is not None]
        time = f"{statistics.median(seconds):.2f}" if len(seconds) == len(results) else "not reached"
        sent = results[0].bytes_sent / results[0].curve[-1]["samples"]
        print(f"| {name} | {ranks} | {speed:,.0f} | {time} | {results[0].epochs:.2f} | {sent:,.0f} |")


if __name__ == "__main__":
    main()
