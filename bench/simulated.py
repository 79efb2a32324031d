"""Whether the simulator tells the truth: its step times against real ones, on this machine.

`python bench/simulated.py [RANKS ...] [STRATEGY ...]`, by default 1, 2 and 4 ranks of each. mnist-mlp, batch 64:
all-reduce and the asynchronous server on mpi, HOGWILD! in compiled threads. The simulator is told what was measured a
moment before, and none of the times that it shall foretell: the steps of each rank, one by one, as it computes them by
itself, in the run's own code and with messages that go through memory but to nobody, while the others compute too;
all-reduces, or an empty message and its answer, while nobody computes; the speed at which threads that read and write
one vector do it. Where workers wait for a server, so many compute at once as the simulator said when it was told of
times with others. Real and simulated runs take turns; of each there is the median of ROUNDS, or of as many as begin
within MOST_S.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Barrier, Thread
from typing import Any, NamedTuple

import common  # before NumPy is loaded: it sets one BLAS thread
import numpy as np
import torch
from alone import NAP_S
from lost import Case, in_memory
from ranks import BATCH, LR, MEASURED, TASK, WARM_UP, size_of

import hocket
from hocket.core.replica import Replica
from hocket.engines.catalogue import Listener, Program, engine
from hocket.engines.sim_costs import collective_s
from hocket.kernels.memory.vector import MappedVector
from hocket.kernels.models.family import spread_out
from hocket.run.loading import load_task
from hocket.run.spec import RunSpec
from hocket.run.train import prepare
from hocket.strategies import strategy as strategies
from hocket.tasks.base import compiled

ROUNDS = 3
STEPS, FORETOLD = 400, MEASURED
"""Of a real run, and of a simulated one, which plays what was measured once."""
MOST_S = 180
"""Seconds after which no round begins, but the first of each."""
CORES = len(os.sched_getaffinity(0))
GUESSES = 3
"""Of how many workers compute at once, the first one included."""
WITHIN = 0.15
FREE = "1000000GB"
"""What moves so many bytes a second takes no time for them."""


class Told(NamedTuple):
    """What the simulator is told: the seconds of each rank's steps, and options."""

    times: list[list[float]]
    options: dict[str, str]


# What is measured of ranks of mpi.


def measure(strategy: str, workers: int, at_once: int, idle_s: float) -> tuple[Sequence[list[float]], Sequence[Any]]:
    """What each rank computes, and what ranks say to each other."""
    spec = RunSpec(
        TASK, strategy=strategy, engine="mpi", workers=workers, batch=BATCH, lr=LR, momentum=0.0,
        steps=WARM_UP + MEASURED, evaluate_every=1e6, trace=0,
    )  # fmt: skip
    plan, servers = prepare(spec).plan, strategies.make(strategy).server_ranks()
    crowded = workers + servers > CORES
    argument = {"plan": plan.to_json(), "crowded": crowded, "at_once": at_once, "idle_s": idle_s}
    found = engine.make("mpi").run(Program("ranks:measured", argument), workers + servers, Listener())
    work, said = zip(*found, strict=True)
    return work, said


def told_of_collectives(strategy: str, ranks: int, parameters: int) -> Told:
    """What `sim` asks for an all-reduce is so many latencies, and its bytes so many times.

    A message's bytes are copied by who sends and who receives it, on the cores that they compute on, so they are in
    what these compute, and so is meeting and waking up. Where ranks share cores, what one computes in an all-reduce
    keeps a core from others.
    """
    computed, said = measure(strategy, ranks, ranks, 0.0)
    small_s, large_s, in_small_s, in_large_s = (statistics.mean(found) for found in zip(*said, strict=True))
    if ranks > CORES:
        computed = [[seconds + in_large_s for seconds in line] for line in computed]
        small_s = large_s = max(small_s - in_small_s * ranks / CORES, 0.0)
    met_s = small_s if ranks <= CORES else 0.0
    told: dict[str, str] = {"memory": FREE}
    if ranks > 1:
        latencies, sent = (collective_s("all_reduce", 4 * parameters, ranks, *cost) for cost in ((1, 0), (0, 1)))
        bandwidth = sent / max(large_s - small_s, 1e-9) / 1e9
        told |= {"latency": f"{(small_s - met_s) / latencies:.9f}s", "bandwidth": f"{bandwidth:.6f}GB"}
    return Told(list(computed), told)


def told_of_server(
    crowded: bool, computed: Sequence[list[float]], served: list[float], answered_s: float, handled_s: float,
    awake_s: float,
) -> Told:  # fmt: skip
    """Who waits computes nothing; but where ranks share cores it soon sleeps, and to do so and wake takes its core."""
    more_s = max(handled_s - awake_s, 0.0) if crowded else 0.0
    latency_s = max(answered_s - 2 * (awake_s + more_s), 0.0) / 2
    options = {
        "serve": f"{statistics.mean(served) + more_s:.9f}s",
        "latency": f"{latency_s:.9f}s",
        "bandwidth": FREE,
        "memory": FREE,
    }
    return Told([[seconds + more_s for seconds in line] for line in computed], options)


def foretold_of_server(strategy: str, workers: int) -> float:
    """Seconds a step. How many workers compute at once, and how long the server is idle between two pushes, decides how
    long they take, and is foretold from that: so it is measured again as it was foretold."""
    crowded = workers + 1 > CORES
    at_once, idle_s, tried = workers, NAP_S if crowded else 0.0, set[int]()
    while True:
        tried.add(at_once)
        work, said = measure(strategy, workers, at_once, idle_s)
        told = told_of_server(crowded, work[:workers], work[workers], *said[0])
        step_s = simulated(strategy, workers, told)
        compute_s = statistics.mean(statistics.mean(line) for line in told.times)
        serve_s = statistics.mean(work[workers])
        print(
            f"  {at_once} of {workers} compute at once: {1e3 * compute_s:.3f} ms, a push {1e3 * serve_s:.3f}: "
            f"{1e3 * step_s:.3f}", file=sys.stderr,
        )  # fmt: skip
        at_once = min(max(round(workers * compute_s / step_s), 1), workers)
        idle_s = max(step_s / workers - serve_s, 0.0)
        if at_once in tried or len(tried) == GUESSES:
            return step_s


# What is measured of threads.


def compiled_batches(threads: int) -> list[list[float]]:
    """Seconds that each of so many threads computes for its batches, with a vector of its own, while all do so."""
    task = load_task(TASK, 0)
    train, _ = task.load()
    replica = Replica(task.build_model(0))
    kernel = compiled(replica.model, task.loss, train)
    assert kernel is not None
    kernel.compile()
    own = strategies.make("hogwild").compiled_sharing(kernel.dim, threads)
    assert own is not None
    start, found, sharing = Barrier(threads), [[0.0]] * threads, dataclasses.replace(own, workers=1)

    def run(index: int) -> None:
        vector = MappedVector.create(sharing, replica.x)
        worker = kernel.worker(0, BATCH)
        order = np.random.default_rng(index).permutation(len(train))[: BATCH * STEPS]
        worker.run_epoch(vector, order[: WARM_UP * BATCH], LR)
        vector.control[:] = MappedVector.create(sharing, replica.x).control
        start.wait()
        spread_out(index, threads)
        began = time.thread_time()
        worker.run_epoch(vector, order, LR)
        mean_s = (time.thread_time() - began) / STEPS
        apart: list[float] = (np.diff(worker.log.clock_ns) / 1e9).tolist()
        found[index] = apart if threads <= CORES else [mean_s]

    with kernel.running():
        workers = [Thread(target=run, args=(index,)) for index in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return found


def told_of_threads(threads: int, parameters: int) -> Told:
    """In a vector of its own a thread's reads and updates are in its batch; what they cost more where others write is
    memory's."""
    batches = compiled_batches(threads)
    alone_s = statistics.mean(statistics.mean(line) for line in batches)
    case = Case(parameters, parameters, int(alone_s * 1e9), 200, reads=True)
    own_ns, shared_ns = (in_memory(case, n).update_ns for n in (1, min(threads, CORES)))
    more_s = max(shared_ns - own_ns, 1.0) / 1e9
    return Told(batches, {"memory": f"{3 * 4 * parameters / more_s / 1e9:.6f}GB"})


# The two sides.


def real(strategy: str, ranks: int) -> float:
    where = "threads" if strategy == "hogwild" else "mpi"
    result = hocket.fit(
        TASK, strategy=strategy, engine=where, workers=ranks, batch=BATCH, steps=STEPS, trace=0, lr=LR, progress=False
    )
    return result.seconds / result.steps


def simulated(strategy: str, ranks: int, told: Told) -> float:
    with TemporaryDirectory() as folder:
        path = Path(folder, "times.txt")
        path.write_text("".join(" ".join(f"{seconds:.9f}" for seconds in line) + "\n" for line in told.times))
        sim: dict[str, Any] = {"cores": CORES, "compute": f"times:{path}", **told.options}
        result = hocket.fit(
            TASK, strategy=strategy, engine="sim", sim=sim, workers=ranks, batch=BATCH, steps=FORETOLD, trace=0, lr=LR,
            progress=False,
        )  # fmt: skip
    return (result.virtual_seconds or 0.0) / result.steps


def foretold(strategy: str, ranks: int, parameters: int) -> float:
    if strategies.make(strategy).server_ranks():
        return foretold_of_server(strategy, ranks)
    threads = strategy == "hogwild"
    told = told_of_threads(ranks, parameters) if threads else told_of_collectives(strategy, ranks, parameters)
    return simulated(strategy, ranks, told)


def main() -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    torch.set_num_threads(1)
    parameters = size_of(load_task(TASK, 0))
    common.say_where()
    chosen = [word for word in sys.argv[1:] if not word.isdigit()] or ["allreduce", "server:mode=async", "hogwild"]
    sizes = [int(word) for word in sys.argv[1:] if word.isdigit()] or [1, 2, 4]
    found: dict[tuple[str, int], list[tuple[float, float]]] = {row: [] for row in product(chosen, sizes)}
    until = time.monotonic() + MOST_S
    for turn, row in product(range(ROUNDS), found):
        if turn and time.monotonic() > until:
            break
        sides = partial(real, *row), partial(foretold, *row, parameters)
        tries = common.TRIES if turn else 1
        real_s, sim_s = (common.undisturbed(side, tries) for side in sides)
        found[row].append((real_s, sim_s))
        print(f"{row[0]} {row[1]}: {1e3 * real_s:.3f} {1e3 * sim_s:.3f}", file=sys.stderr, flush=True)
    print_table(found)


def print_table(found: dict[tuple[str, int], list[tuple[float, float]]]) -> None:
    print(f"{CORES} cores; milliseconds a step, medians (from, to)")
    print("| strategy | ranks | rounds | real | `sim` | ratio |\n| --- | ---: | ---: | ---: | ---: | ---: |")
    for (strategy, ranks), rounds in found.items():
        cells = [
            f"{1e3 * statistics.median(side):.3f} ({1e3 * min(side):.3f}, {1e3 * max(side):.3f})"
            for side in zip(*rounds, strict=True)
        ]
        ratio = statistics.median(f for _, f in rounds) / statistics.median(r for r, _ in rounds)
        verdict = "" if abs(ratio - 1) <= WITHIN else ", missed"
        print(f"| `{strategy}` | {ranks} | {len(rounds)} | {' | '.join(cells)} | {ratio:.2f}{verdict} |", flush=True)


if __name__ == "__main__":
    main()
