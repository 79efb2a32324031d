"""Test accuracy of every optimizer at the rate that it begins with, beside the task's own: serial, 3 seeds."""

from __future__ import annotations

import statistics

from common import say_where  # before NumPy is loaded: it sets one BLAS thread

import hocket
from hocket import optim

EPOCHS = {"digits": 30, "blobs": 6}
SEEDS = range(3)


def accuracy(task: str, optimizer: str | None) -> float:
    settings = dict(strategy="serial", engine="threads", optimizer=optimizer, epochs=EPOCHS[task], trace=0)
    found = [hocket.fit(task, seed=seed, progress=False, **settings).test_metric for seed in SEEDS]
    return statistics.median(0.0 if metric is None else metric for metric in found)


def main() -> None:
    say_where()
    print("| optimizer | rate |", " | ".join(EPOCHS), "|")
    print("| --- |" + " --- |" * (1 + len(EPOCHS)))
    for name in [None, *sorted(optim.OPTIMIZERS)]:
        found = " | ".join(f"{accuracy(task, name):.3f}" for task in EPOCHS)
        if name is None:
            print("| the task's own | its own |", found, "|", flush=True)
        else:
            print(f"| `{name}` | {optim.RATES[name]:g} |", found, "|", flush=True)


if __name__ == "__main__":
    main()
