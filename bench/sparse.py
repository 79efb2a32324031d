"""The linear support vector machine on imdb, compiled: against scikit-learn's on one thread, and on two threads."""

from __future__ import annotations

import os
import time
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import numpy as np
import torch
from common import compare

from hocket.core.shared import Sharing
from hocket.core.vector import FlatModel
from hocket.kernels.control import NEXT
from hocket.kernels.family import KernelWorker
from hocket.kernels.vector import Block, SharedVector, nbytes
from hocket.tasks import task
from hocket.tasks.base import compiled, make_task
from hocket.tasks.sparse import SparseRows

FOLDER = Path(os.environ["HOCKET_DATA"], "svm")


class Bench:
    """Whole training runs with the task's own settings; speeds are examples a second of all epochs, by wall time."""

    def __init__(self) -> None:
        self.task = make_task(task.make("svm"), 0, FOLDER / "imdb_train.svm.gz", FOLDER / "imdb_test.svm.gz")
        self.train, self.test = (samples.samples for samples in self.task.load())
        self.model = FlatModel(self.task.build_model(0))
        kernel = compiled(self.model.model, self.task.loss, self.task.load()[0])
        assert kernel is not None
        self.kernel = kernel
        rng = np.random.default_rng(0)
        self.orders = [rng.permutation(kernel.samples) for _ in range(self.task.epochs)]
        self.accuracies: dict[str, float] = {}
        began = time.perf_counter()
        kernel.worker(0, self.task.batch).compile()
        print(f"compiled in {time.perf_counter() - began:.1f} s (less where it was cached)")

    def speed(self, seconds: float) -> float:
        return self.kernel.samples * self.task.epochs / seconds

    def hogwild(self, workers: int, every: int = 1) -> float:
        sharing = Sharing("hogwild", self.kernel.dim, workers, every=every)
        vector = SharedVector.create(Block.anonymous(nbytes(sharing)), sharing)
        vector.set(np.zeros(self.kernel.dim, np.float32))
        crew = [self.kernel.worker(index, self.task.batch) for index in range(workers)]
        epoch_begins = Barrier(workers, action=lambda: vector.control.__setitem__(NEXT, 0))

        def run(worker: KernelWorker) -> None:
            for epoch, order in enumerate(self.orders):
                epoch_begins.wait()
                worker.run_epoch(vector, order, self.task.lr * self.task.lr_decay**epoch)

        threads = [Thread(target=run, args=(worker,)) for worker in crew]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - began
        x = np.empty(self.kernel.dim, np.float32)
        vector.snapshot(x)
        inputs, targets = self.test.take(torch.arange(len(self.test)))
        with torch.no_grad():
            self.model.x.copy_(torch.from_numpy(x))
            scores = self.model.model.eval()(inputs)
        self.accuracies[f"hocket, threads: {workers}, every={every}"] = float(self.task.metric(scores, targets))
        return self.speed(seconds)

    def scikit(self) -> float:
        """The same rows, epochs and strength of the penalty; its own shuffling and learning rates."""
        from sklearn.linear_model import SGDClassifier

        penalty = 1.0 / self.kernel.samples
        machine = SGDClassifier(loss="hinge", alpha=penalty, max_iter=self.task.epochs, tol=None, random_state=0)
        inputs = matrix(self.train)
        began = time.perf_counter()
        machine.fit(inputs, self.train.targets)
        seconds = time.perf_counter() - began
        self.accuracies["scikit-learn"] = machine.score(matrix(self.test), self.test.targets)
        return self.speed(seconds)


def matrix(rows: SparseRows) -> Any:
    from scipy.sparse import csr_matrix

    table = rows.table
    return csr_matrix((table.values, table.columns, table.pointers), shape=(len(rows), rows.features))


if __name__ == "__main__":
    torch.set_num_threads(1)
    bench = Bench()
    compare("hocket, 1 thread", lambda: bench.hogwild(1), "scikit-learn", bench.scikit, "examples/s")
    for every in (1, 16, 64):
        name = f"2 threads, every={every}"
        compare(name, lambda every=every: bench.hogwild(2, every), "1 thread", lambda: bench.hogwild(1), "examples/s")  # type: ignore[misc]
    for name, accuracy in bench.accuracies.items():
        print(f"{name}: test accuracy {accuracy:.4f}")
