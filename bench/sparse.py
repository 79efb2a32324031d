"""The linear support vector machine on imdb, compiled: against scikit-learn's on one thread, and on more threads.

`python bench/sparse.py [THREADS ...]`: with numbers of threads, the first of which is 1, a table of these alone.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import numpy as np
import torch
from common import Measured, compare, say_where, undisturbed

from hocket.core.replica import Replica
from hocket.kernels.memory.vector import MappedVector
from hocket.kernels.models.family import KernelWorker
from hocket.strategies.shared_memory import Hogwild
from hocket.tasks import task
from hocket.tasks.base import compiled, make_task
from hocket.tasks.linear import SparseRows

DEFAULT = Hogwild()
AS_PUBLISHED = Hogwild(exchange="weights")
WAYS = (DEFAULT, AS_PUBLISHED, *(Hogwild(every=every) for every in (16, 64, 256)))
ROUNDS = 7
FOLDER = Path(os.environ["HOCKET_DATA"], "svm")


class Bench:
    """Whole training runs with the task's own settings; speeds are examples a second of all epochs.

    An epoch lasts from the shuffling of its rows, which scikit-learn's clock has inside too, to the last worker's end.
    """

    def __init__(self) -> None:
        self.task = make_task(task.make("svm"), 0, FOLDER / "imdb_train.svm.gz", FOLDER / "imdb_test.svm.gz")
        self.train, self.test = (samples.samples for samples in self.task.load())
        self.model = Replica(self.task.build_model(0))
        kernel = compiled(self.model.model, self.task.loss, self.task.load()[0])
        assert kernel is not None
        self.kernel = kernel
        self.accuracies: dict[str, float] = {}
        self.matrix = matrix(self.train)
        began = time.perf_counter()
        kernel.worker(0, self.task.batch).compile()
        print(f"compiled in {time.perf_counter() - began:.1f} s (less where it was cached)")

    def speed(self, seconds: float, name: str) -> Measured:
        return Measured(self.kernel.samples * self.task.epochs / seconds, self.accuracies[name])

    def hogwild(self, workers: int, strategy: Hogwild = DEFAULT) -> Measured:
        sharing = strategy.compiled_sharing(self.kernel.dim, workers, sparse=True, by_rows=self.kernel.by_rows)
        vector = MappedVector.create(sharing, torch.zeros(self.kernel.dim))
        crew = [self.kernel.worker(index, self.task.batch) for index in range(workers)]
        rng, order = np.random.default_rng(0), np.arange(self.kernel.samples)
        began: list[float] = []
        ended = np.zeros((workers, self.task.epochs))

        def begin_epoch() -> None:
            began.append(time.perf_counter())
            rng.shuffle(order)
            vector.hand_out(0)

        epoch_begins = Barrier(workers, action=begin_epoch)

        def run(index: int, worker: KernelWorker) -> None:
            seat = vector.seen_by(index)
            for epoch in range(self.task.epochs):
                epoch_begins.wait()
                worker.run_epoch(seat, order, self.task.lr * self.task.lr_decay**epoch)
                ended[index, epoch] = time.perf_counter()

        threads = [Thread(target=run, args=each) for each in enumerate(crew)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = float((ended.max(0) - np.array(began)).sum())
        name = f"hocket, threads: {workers}, {told(strategy)}"
        if name not in self.accuracies:  # in the warm-up alone, as it fills the caches with other things
            x = torch.empty(self.kernel.dim)
            vector.snapshot(x)
            inputs, targets = self.test.take(torch.arange(len(self.test)))
            with torch.no_grad():
                self.model.x.copy_(x)
                scores = self.model.model.eval()(inputs)
            self.accuracies[name] = float(self.task.metric(scores, targets))
        return self.speed(seconds, name)

    def scikit(self) -> Measured:
        """The same rows, epochs and strength of the penalty; its own shuffling and learning rates."""
        from sklearn.linear_model import SGDClassifier

        penalty = 1.0 / self.kernel.samples
        machine = SGDClassifier(loss="hinge", alpha=penalty, max_iter=self.task.epochs, tol=None, random_state=0)
        inputs = self.matrix
        began = time.perf_counter()
        machine.fit(inputs, self.train.targets)
        seconds = time.perf_counter() - began
        if "scikit-learn" not in self.accuracies:
            self.accuracies["scikit-learn"] = machine.score(matrix(self.test), self.test.targets)
        return self.speed(seconds, "scikit-learn")


def matrix(rows: SparseRows) -> Any:
    from scipy.sparse import csr_matrix

    table = rows.table
    return csr_matrix((table.values, table.columns, table.pointers), shape=(len(rows), rows.features))


def told(strategy: Hogwild) -> str:
    return "default" if strategy == DEFAULT else f"exchange={strategy.exchange}, every={strategy.every}"


def curve(bench: Bench, threads: list[int]) -> None:
    """Examples/s by the number of threads, and over one thread at the defaults; medians of interleaved rounds."""
    found: dict[tuple[int, Hogwild], list[Measured]] = {}
    for _ in range(ROUNDS):
        for workers in threads:
            for way in WAYS:
                found.setdefault((workers, way), []).append(undisturbed(functools.partial(bench.hogwild, workers, way)))
    alone = [run.value for run in found[threads[0], DEFAULT]]
    print("| threads | " + " | ".join(map(told, WAYS)) + " |\n| --- |" + " ---: |" * len(WAYS))
    for workers in threads:
        speeds = [[run.value for run in found[workers, way]] for way in WAYS]
        print(f"| {workers} | " + " | ".join(against(runs, alone) for runs in speeds) + " |", flush=True)


def against(runs: list[float], alone: list[float]) -> str:
    """The median, and the ratio to one thread in the same round, from the smallest to the largest."""
    ratios = [run / one for run, one in zip(runs, alone, strict=True)]
    middle, ratio = statistics.median(runs) / 1e6, statistics.median(ratios)
    return f"{middle:.2f} M ({ratio:.2f}; {min(ratios):.2f} to {max(ratios):.2f})"


if __name__ == "__main__":
    torch.set_num_threads(1)
    say_where()
    bench = Bench()
    if len(sys.argv) > 1:
        curve(bench, [int(n) for n in sys.argv[1:]])
    else:
        compare("hocket, 1 thread", lambda: bench.hogwild(1), "scikit-learn", bench.scikit, "examples/s")
        for way in WAYS:
            run = functools.partial(bench.hogwild, 2, way)
            compare(f"2 threads, {told(way)}", run, "1 thread", lambda: bench.hogwild(1), "examples/s")
    for name, accuracy in bench.accuracies.items():
        print(f"{name}: test accuracy {accuracy:.4f}")
