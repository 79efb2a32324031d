"""The asynchronous server on mpi, 2 workers and 1 server, against serial training: mnist-mlp, batch 512."""

from __future__ import annotations

from common import compare

import hocket

BATCH, EPOCHS = 512, 4


def run(strategy: str, workers: int) -> float:
    result = hocket.fit(
        "mnist-mlp", strategy=strategy, engine="mpi", workers=workers, batch=BATCH, epochs=EPOCHS, trace=0,
        progress=False,
    )  # fmt: skip
    return result.samples_per_s


if __name__ == "__main__":
    for strategy in ("server:mode=async", "server:mode=async,stale=none"):
        compare(strategy, lambda s=strategy: run(s, 2), "serial", lambda: run("serial", 1), "samples/s")
