"""A workload that shows every torn read and lost update: each update adds 1 to all parameters.

As a program it runs in processes: `canary.py count METHOD` or `canary.py kill METHOD KILLS` print what happened, in
JSON. The processes are forked from this one, which has one thread and all kernels loaded, so that they start at once.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import numpy as np
import torch

from hocket.core.sharing import Sharing
from hocket.kernels.jit import kernel
from hocket.kernels.memory.atomics import fetch_add
from hocket.kernels.memory.block import Block
from hocket.kernels.memory.updates import acquire, close_read, close_write, open_read, open_write, publish, stopped
from hocket.kernels.memory.vector import MappedVector, nbytes
from hocket.kernels.memory.words import BROKEN, NEXT, NO_ROW, READ_VERSION, WORKER_AREA, WORKER_WORDS

TORN, BROKE = 0, 1
WAIT_S = 100.0
MOST = 500


@kernel
def _is_torn(x, dim):
    torn = False
    for i in range(dim):
        torn |= x[i] != x[0]
    return torn


@kernel
def work(control, rows, w, dim, updates, sparse, minus_one, report):
    """Take part until `updates` are handed out to all workers, or until asked to stop. Counts what went wrong."""
    while fetch_add(control, NEXT, 1) < updates and not stopped(control):
        row = open_read(control, w) if sparse else acquire(control, rows, w, dim)
        if row == NO_ROW:
            report[BROKE] += 1
            return
        read_version = control[WORKER_AREA + w * WORKER_WORDS + READ_VERSION]
        if _is_torn(rows[row], dim) or rows[row, 0] != read_version:
            report[TORN] += 1
        if not sparse:
            status = publish(control, rows, w, row, minus_one, 1.0, dim)
        else:
            close_read(control, w, row)
            status = 1
            while status == 1:
                row = open_write(control, rows, w, dim)
                if row == NO_ROW:
                    status = BROKEN
                else:
                    for i in range(dim):
                        rows[row, i] -= minus_one[i]
                    status = close_write(control, w, row)
        if status == BROKEN:
            report[BROKE] += 1
            return


def take_part(vector: MappedVector, updates: int, sparse: bool, report: np.ndarray) -> None:
    dim = vector.sharing.dim
    work(vector.control, vector.rows, vector.worker, dim, updates, sparse, np.full(dim, -1, np.float32), report)


def in_threads(vector: MappedVector, updates: int, sparse: bool = False) -> int:
    """Run all workers as threads; returns how many reads were torn."""
    reports = np.zeros((vector.sharing.workers, 8), np.int64)
    start = Barrier(vector.sharing.workers)

    def run(w: int) -> None:
        start.wait(WAIT_S)
        take_part(vector.seen_by(w), updates, sparse, reports[w])

    threads = [Thread(target=run, args=(w,)) for w in range(vector.sharing.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert not reports[:, BROKE].any()
    return int(reports[:, TORN].sum())


def values(vector: MappedVector) -> np.ndarray:
    out = torch.empty(vector.sharing.dim)
    vector.snapshot(out)
    return out.numpy()


class Crew:
    """Workers in forked processes, each of which maps the block by its path."""

    def __init__(self, sharing: Sharing, updates: int) -> None:
        block = Block.create(nbytes(sharing))
        self.path = block.path
        self.vector = MappedVector.create(sharing, torch.zeros(sharing.dim), block)
        self.reports = Block.anonymous(64 * sharing.workers)
        mapped, map_done = os.pipe()
        self.workers = [self._fork(w, sharing, updates, map_done) for w in range(sharing.workers)]
        for _ in self.workers:
            assert os.read(mapped, 1) == b"."
        os.close(mapped)
        os.close(map_done)
        block.unlink()

    def _fork(self, w: int, sharing: Sharing, updates: int, map_done: int) -> int:
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            vector = MappedVector(Block.attach(self.path), sharing, w)
            os.write(map_done, b".")
            take_part(vector, updates, False, self.report(w))
            code = 0
        finally:
            os._exit(code)

    def report(self, w: int) -> Any:
        return np.frombuffer(self.reports.memory, np.int64, 8, 64 * w)

    def kill(self) -> bool:
        """Kill one worker by SIGKILL; whether it was still at work."""
        child = self.workers.pop()
        os.kill(child, signal.SIGKILL)
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])

    def join(self) -> bool:
        """Whether all workers came to their end in time."""
        until = time.monotonic() + WAIT_S
        while self.workers and time.monotonic() < until:
            child, status = os.waitpid(self.workers[-1], os.WNOHANG)
            if child:
                self.workers.pop()
                assert status == 0
            else:
                time.sleep(0.001)
        ended = not self.workers
        while self.workers:
            self.kill()
        return ended


def count(method: Any) -> dict[str, Any]:
    """100,000 updates in 4 processes."""
    crew = Crew(Sharing(method, dim=1000, workers=4), updates=100_000)
    assert crew.join()
    x = values(crew.vector)
    return {
        "torn": sum(int(crew.report(w)[TORN]) for w in range(4)),
        "lowest": float(x.min()),
        "highest": float(x.max()),
        "version": crew.vector.version,
        "updates": crew.vector.statistics().updates,
        "references": crew.vector.references(),
        "peak": crew.vector.statistics().peak_vectors,
        "left": Path(crew.path).exists(),
    }


def kill(method: Any, kills: int) -> dict[str, Any]:
    """Crews of 6 of which 5 are killed at work, one after the other; the last one must go on.

    That is done until enough were killed and one of them held a lock or a slot, which is a hit, but not for ever.
    """
    chance = random.Random()
    result = dict(kills=0, hits=0, crews=0, went_on=0, broke=0, hung=0, torn=0, recovered=0, left=0)
    while result["kills"] < kills or (method != "hogwild" and not result["hits"] and result["kills"] < MOST):
        deadline_s = 0.3 if method == "rwlock" else 10.0
        crew = Crew(Sharing(method, dim=20_000, workers=6, deadline_s=deadline_s), updates=2**62)
        for _ in range(5):
            time.sleep(chance.uniform(0.001, 0.02))
            result["kills"] += crew.kill()
        went_on = _goes_on(crew.vector)
        crew.vector.stop()
        result["crews"] += 1
        result["hung"] += not crew.join()
        result["went_on"] += went_on
        statistics = crew.vector.statistics()
        result["broke"] += statistics.broken > 0
        result["recovered"] += statistics.recovered
        result["torn"] += sum(int(crew.report(w)[TORN]) for w in range(6))
        result["left"] += Path(crew.path).exists()
        result["hits"] += statistics.recovered + (statistics.broken > 0) + any(crew.vector.references())
    return result


def _goes_on(vector: MappedVector) -> bool:
    """Whether updates still come; False as soon as a broken lock ends the run."""
    goal, until = vector.version + 20, time.monotonic() + WAIT_S
    while vector.version < goal:
        if stopped(vector.control):
            return False
        assert time.monotonic() < until, "neither an update nor a verdict"
        time.sleep(0.001)
    return True


if __name__ == "__main__":
    in_threads(MappedVector.create(Sharing("hogwild", 16, 1), torch.zeros(16)), 10)  # load the kernels
    what, how, *times = sys.argv[1:]
    print(json.dumps(count(how) if what == "count" else kill(how, int(times[0]))))
