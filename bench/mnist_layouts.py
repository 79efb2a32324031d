"""The MNIST study: one SGD with batches of 64, serial, data-parallel and model-parallel, as a table.

`python bench/mnist_layouts.py [TASK] [RANKS ...] [KEY=VALUE ...]`: every way trains until the test accuracy is there,
or for some epochs. Settings such as lr=0.2 take the place of those below.
"""

from __future__ import annotations

import sys
from typing import Any

from common import say_where

import hocket

BATCH = 64
LEARNING = {"lr": 0.03, "momentum": 0.9, "lr_decay": 0.8, "epochs": 4.0}
TARGETS = (0.97, 0.985)


def ways(ranks: int) -> list[tuple[str, dict[str, Any]]]:
    if ranks == 1:
        return [("serial", {"strategy": "serial", "workers": 1, "batch": BATCH})]
    return [
        (f"threads={ranks}", {"strategy": f"serial:threads={ranks}", "workers": 1, "batch": BATCH}),
        ("data", {"workers": ranks, "batch": BATCH // ranks}),
        (f"tensor={ranks}", {"layout": f"tensor={ranks}", "batch": BATCH}),
        (f"pipeline={ranks}", {"layout": f"pipeline={ranks},microbatches=4", "batch": BATCH}),
    ]


def reached(result: hocket.Result, target: float) -> str:
    """Seconds and epochs to an accuracy."""
    for point in result.curve:
        if (point[f"test_{result.metric}"] or 0.0) >= target:
            return f"{point['seconds']:.1f} | {point['epoch']:.2f}"
    return "not reached | "


def main() -> None:
    words = [word for word in sys.argv[1:] if "=" not in word]
    learning: dict[str, Any] = LEARNING | {
        key: float(value) for key, value in (word.split("=") for word in sys.argv[1:] if "=" in word)
    }
    learning["epochs"] = int(learning["epochs"])
    task, *counts = words or ["mnist-mlp"]
    say_where()
    print(learning)
    names = " | ".join(f"s to {target} | epochs to {target}" for target in TARGETS)
    print(f"| {task} | ranks | samples/s | {names} | bytes a sample |")
    print("| --- | --- | --- |" + " --- | --- |" * len(TARGETS) + " --- |")
    for ranks in map(int, counts or (1, 2, 4)):
        for name, settings in ways(ranks):
            result = hocket.fit(
                task,
                engine="mpi",
                target=max(TARGETS),
                evaluate_every=0.25,
                progress=False,
                **learning,
                **settings,
            )
            found = " | ".join(reached(result, target) for target in TARGETS)
            sent = result.bytes_sent / result.curve[-1]["samples"]
            print(f"| {name} | {ranks} | {result.samples_per_s:,.0f} | {found} | {sent:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
