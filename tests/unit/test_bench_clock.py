"""What the benchmark of sparse rows has inside its clock: all that scikit-learn's has."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.core.replica import Replica
from hocket.tasks import task
from hocket.tasks.base import compiled, make_task

BENCH = Path(__file__).parents[2] / "bench"
SHUFFLE_S = 0.2


class SlowShuffle:
    def shuffle(self, order: np.ndarray) -> None:
        time.sleep(SHUFFLE_S)


def a_bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark, of the made-up texts."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # which importing it sets for good
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    monkeypatch.setenv("HOCKET_DATA", os.environ.get("HOCKET_DATA", ""))
    monkeypatch.syspath_prepend(str(BENCH))
    import sparse

    bench = sparse.Bench.__new__(sparse.Bench)
    bench.task = make_task(task.make("svm"), 0, None)
    bench.model = Replica(bench.task.build_model(0))
    bench.train, bench.test = (samples.samples for samples in bench.task.load())
    bench.kernel = compiled(bench.model.model, bench.task.loss, bench.task.load()[0])
    bench.accuracies = {}
    return bench


@pytest.mark.parametrize("workers", [1, 2])
def test_shuffling_is_inside_the_clock(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    bench = a_bench(monkeypatch)
    bench.hogwild(workers)  # compiles
    monkeypatch.setattr(np.random, "default_rng", lambda seed: SlowShuffle())
    assert bench.hogwild(workers).value < bench.kernel.samples / SHUFFLE_S
