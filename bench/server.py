"""The asynchronous server on mpi, one server, against serial training: mnist-mlp, batch 512.

`python bench/server.py [WORKERS [ROUNDS]]`, by default 2 and 7.
"""

from __future__ import annotations

import sys

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
    workers, rounds = [int(word) for word in (*sys.argv[1:], *("2", "7")[len(sys.argv) - 1 :])]
    for strategy in ("server:mode=async", "server:mode=async,stale=none,lookahead=0"):
        compare(strategy, lambda s=strategy: run(s, workers), "serial", lambda: run("serial", 1), "samples/s", rounds)
