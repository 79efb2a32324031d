"""Batches/s of compiled shared-memory workers on the MNIST MLP, as shares of the machine's peaks.

For each batch size: hogwild with 2 threads against 1, the same with copies for 16 batches, and leashed against hogwild
with 2 threads, interleaved.
"""

from __future__ import annotations

import statistics
import sys
import time

from common import Measured, compare, say_where, speed_of

import hocket
from hocket.tasks import task

BATCHES = {512: 6, 64: 3, 16: 3, 1: 1}  # and epochs, so that a run takes about a second
MFLOP_A_SAMPLE = 0.606
GATHERING = "hogwild:every=16"


def batches(strategy: str, workers: int, batch: int) -> Measured:
    result = hocket.fit(
        "mnist-mlp", strategy=strategy, workers=workers, batch=batch, epochs=BATCHES[batch], lr=0.01, progress=False
    )
    assert result.shared is not None and result.engine == "threads"
    return speed_of(result, batch)


def sgemm_gflops() -> float:
    """The best of some products of 1024 x 1024 matrices on one core, by the BLAS that the kernels use."""
    import numpy as np
    import scipy.linalg
    from threadpoolctl import threadpool_limits

    a = np.asfortranarray(np.random.default_rng(0).random((1024, 1024), dtype=np.float32))
    best = 0.0
    with threadpool_limits(1):
        for _ in range(20):
            began = time.perf_counter()
            scipy.linalg.blas.sgemm(1.0, a, a)
            best = max(best, 2 * 1024**3 / (time.perf_counter() - began) / 1e9)
    return best


def copy_gb_per_s() -> float:
    """What one core copies between vectors as long as the model, reads and writes counted."""
    import numpy as np

    a, b = np.zeros((2, 134_794), np.float32)
    times = []
    for _ in range(200):
        began = time.perf_counter()
        for _ in range(10):
            np.copyto(a, b)
        times.append(time.perf_counter() - began)
    return 10 * 2 * a.nbytes / statistics.median(times) / 1e9


if __name__ == "__main__":
    say_where()
    task.make("mnist-mlp").make(0, None).load()
    peak = sgemm_gflops()
    print(f"one core: sgemm {peak:.1f} GFLOP/s, copies {copy_gb_per_s():.1f} GB/s")
    for batch in map(int, sys.argv[1:] or BATCHES):
        print(f"\nbatch {batch}")
        last: dict[str, Measured] = {}

        def run(strategy: str, workers: int, batch: int = batch, last: dict[str, Measured] = last) -> Measured:
            last[f"{strategy} {workers}"] = batches(strategy, workers, batch)
            return last[f"{strategy} {workers}"]

        compare("hogwild, 2 threads", lambda: run("hogwild", 2), "1 thread", lambda: run("hogwild", 1), "batches/s")
        share = last["hogwild 2"].value * batch * MFLOP_A_SAMPLE / 1e3 / (2 * peak)
        print(f"that is {share:.0%} of two cores' sgemm peak")
        compare(
            f"{GATHERING}, 2 threads", lambda: run(GATHERING, 2), "1 thread", lambda: run("hogwild", 1), "batches/s"
        )
        compare("leashed, 2 threads", lambda: run("leashed", 2), "hogwild", lambda: run("hogwild", 2), "batches/s")
