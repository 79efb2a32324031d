"""The asynchronous server on mpi, 2 workers and 1 server, against serial training: mnist-mlp, batch 512."""

from __future__ import annotations

from common import Measured, compare, say_where, speed_of

import hocket

BATCH, EPOCHS = 512, 4


def run(strategy: str, workers: int) -> Measured:
    result = hocket.fit(
        "mnist-mlp", strategy=strategy, engine="mpi", workers=workers, batch=BATCH, epochs=EPOCHS, trace=0,
        progress=False,
    )  # fmt: skip
    return speed_of(result)


if __name__ == "__main__":
    say_where()
    for strategy in ("server:mode=async", "server:mode=async,stale=none,lookahead=0"):
        compare(strategy, lambda s=strategy: run(s, 2), "serial", lambda: run("serial", 1), "samples/s")
