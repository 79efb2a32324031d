"""Whether the simulator tells the truth: its step times against real ones, on this machine.

`python bench/simulated.py [RANKS ...]`, by default 1, 2 and 4. mnist-mlp, batch 64: all-reduce and the asynchronous
server on mpi, HOGWILD! in compiled threads. The simulator is told what was measured a moment before, and none of the
times that it shall foretell: the gradient of one rank while as many as there are cores compute beside it, without a
word between them; the all-reduces of two ranks, or the messages of one and a server and what that does; the speed at
which threads that write one vector do it. Real and simulated runs take turns; of each there is the median of ROUNDS.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import common  # noqa: F401 - sets one BLAS thread
import numpy as np
import torch
from lost import Case, in_memory

import hocket
from hocket import optim
from hocket.core.comm import Rank
from hocket.core.message import Message
from hocket.core.replica import Replica
from hocket.core.sharing import Sharing
from hocket.core.staleness import Staleness
from hocket.drivers.gradients import WholeModel
from hocket.engines.catalogue import Listener, Program, engine
from hocket.kernels.memory.vector import MappedVector
from hocket.run.loading import load_task
from hocket.tasks.base import compiled

TASK, BATCH, ROUNDS = "mnist-mlp", 64, 3
STEPS, FORETOLD = 400, 100
"""Of a real run, and of a simulated one."""
WARM_UP = 20
CORES = len(os.sched_getaffinity(0))
WITHIN = 0.15


def times(what: Callable[[], Any], count: int, before: Callable[[], Any] | None = None) -> list[float]:
    """Seconds of each call, the first ones left out; `before` it comes what is not counted."""
    found = []
    for _ in range(WARM_UP + count):
        if before is not None:
            before()
        began = time.perf_counter()
        what()
        found.append(time.perf_counter() - began)
    return found[WARM_UP:]


def lognormal(seconds: list[float]) -> str:
    """As an option of the simulator: of this mean, and the spread of the middle two thirds."""
    low, high = np.quantile(np.log(seconds), (1 / 6, 5 / 6))
    sigma = (high - low) / 2
    return f"lognormal:{statistics.mean(seconds) / np.exp(sigma**2 / 2):.9f}s:{sigma:.3f}"


# What ranks of mpi measure.


def own_step() -> Callable[[], None]:
    """A step of one rank for itself: a gradient, and what the optimizer makes of it."""
    torch.set_num_threads(1)
    task = load_task(TASK, 0)
    train, _ = task.load()
    replica = Replica(task.build_model(0))
    source = WholeModel(task, replica, train)
    step = optim.step_of(optim.make(task.optimizer, replica, task.lr, task.momentum))
    batches: Iterator[torch.Tensor] = cycle(torch.randperm(len(train)).split(BATCH))

    def one() -> None:
        source.compute(next(batches))
        step()

    return one


def gradients(rank: Rank, argument: dict[str, Any]) -> list[float]:
    """Steps of one rank beside the others."""
    step = own_step()
    rank.comm.barrier()
    return times(step, STEPS)


def all_reduces(rank: Rank, argument: dict[str, Any]) -> list[float]:
    """Mean seconds of an all-reduce of one and of all parameters, by two ranks.

    Before each of them a rank takes a step for itself: what travels is then where a step leaves it, not in the caches.
    """
    step = own_step()

    def meet_again() -> None:
        step()
        rank.comm.barrier()

    vectors = [torch.zeros(size) for size in (1, argument["parameters"])]
    return [statistics.mean(times(partial(rank.comm.all_reduce, x), 200, meet_again)) for x in vectors]


def requests(rank: Rank, argument: dict[str, Any]) -> list[float]:
    """Mean seconds in which the other rank answers with one and with all parameters, and of what it does in between.

    It is idle while this one takes a step for itself, as a server is.
    """
    sizes, asked = (1, argument["parameters"]), WARM_UP + 200
    if rank.comm.rank == 0:
        step, found = own_step(), []
        for x in [torch.zeros(size) for size in sizes]:

            def ask(x: torch.Tensor = x) -> None:
                rank.comm.isend(1, Message("", (), (x,)))
                rank.comm.recv(1)

            found.append(statistics.mean(times(ask, 200, step)))
        return found
    served = []
    for size in sizes:
        serve = serving(size)
        for _ in range(asked):
            _, message = rank.comm.recv()
            began = time.perf_counter()
            serve(message.tensors[0])
            served.append(time.perf_counter() - began)
            rank.comm.isend(0, message)
    return [statistics.mean(served[WARM_UP:asked]), statistics.mean(served[asked + WARM_UP :])]


def serving(parameters: int) -> Callable[[torch.Tensor], None]:
    """What the server does with one gradient: it tempers it, steps, and keeps what the worker reads."""
    torch.set_num_threads(1)
    x, g, read = torch.zeros((3, parameters))
    step = optim.step_of(optim.make_flat("sgd", x, g, 0.1, 0.0))
    staleness = Staleness("gap-mean", 2, x)

    def serve(pushed: torch.Tensor) -> None:
        g.copy_(staleness.temper(pushed, 0.1, 1, x, read))
        step()
        read.copy_(x)

    return serve


def on_mpi(function: str, ranks: int, **argument: Any) -> list[Any]:
    return engine.make("mpi").run(Program(f"simulated:{function}", argument), ranks, Listener())


def network_options(strategy: str, parameters: int) -> dict[str, str]:
    """An all-reduce of two ranks takes 2 latencies and its bytes once; there and back two messages do."""
    if strategy == "allreduce":
        small_s, large_s = on_mpi("all_reduces", 2, parameters=parameters)[0]
        each, serve_s = 4 * parameters, 0.0
    else:
        answered, served = on_mpi("requests", 2, parameters=parameters)
        small_s, large_s = (seconds - work for seconds, work in zip(answered, served, strict=True))
        each, serve_s = 8 * parameters, served[1]
    bandwidth = each / max(large_s - small_s, 1e-9) / 1e9
    return {"latency": f"{small_s / 2:.9f}s", "bandwidth": f"{bandwidth:.6f}GB", "serve": f"{serve_s:.9f}s"}


# What threads measure.


def compiled_batches(threads: int) -> list[float]:
    """Seconds of a batch in as many threads, each of which has a vector of its own."""
    task = load_task(TASK, 0)
    train, _ = task.load()
    replica = Replica(task.build_model(0))
    kernel = compiled(replica.model, task.loss, train)
    assert kernel is not None
    kernel.compile()
    start, found = Barrier(threads), [0.0] * threads

    def run(index: int) -> None:
        vector = MappedVector.create(Sharing("hogwild", kernel.dim, 1), replica.x)
        worker = kernel.worker(0, BATCH)
        order = np.random.default_rng(index).permutation(len(train))[: BATCH * STEPS]
        worker.run_epoch(vector, order[: 20 * BATCH], 0.01)
        vector.control[:] = MappedVector.create(Sharing("hogwild", kernel.dim, 1), replica.x).control
        start.wait()
        began = time.perf_counter()
        worker.run_epoch(vector, order, 0.01)
        found[index] = (time.perf_counter() - began) / STEPS

    with kernel.running():
        workers = [Thread(target=run, args=(index,)) for index in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return found


def hogwild_options(threads: int, parameters: int) -> dict[str, str]:
    """In a vector of its own a thread's update is in its batch; what it costs more where others write is memory's."""
    alone_s = statistics.mean(compiled_batches(threads))
    case = Case(parameters, parameters, int(alone_s * 1e9), 200)
    own_ns, shared_ns = (in_memory(case, n).update_ns for n in (1, threads))
    more_s = max(shared_ns - own_ns, 1.0) / 1e9
    return {"compute": f"lognormal:{alone_s:.9f}s:0.1", "memory": f"{3 * 4 * parameters / more_s / 1e9:.6f}GB"}


# The two sides.


def real(strategy: str, ranks: int) -> float:
    where = "threads" if strategy == "hogwild" else "mpi"
    result = hocket.fit(
        TASK, strategy=strategy, engine=where, workers=ranks, batch=BATCH, steps=STEPS, trace=0, lr=0.01, progress=False
    )
    return result.seconds / result.steps


def foretold(strategy: str, ranks: int, parameters: int) -> float:
    busy = min(ranks, CORES)
    if strategy == "hogwild":
        options = hogwild_options(busy, parameters)
    else:
        seconds = [s for found in on_mpi("gradients", busy) for s in found]
        options = {"compute": lognormal(seconds), "memory": "1000000GB"} | network_options(strategy, parameters)
    sim: dict[str, Any] = {"cores": CORES, **options}
    result = hocket.fit(
        TASK, strategy=strategy, engine="sim", sim=sim, workers=ranks, batch=BATCH, steps=FORETOLD, trace=0, lr=0.01,
        progress=False,
    )  # fmt: skip
    return (result.virtual_seconds or 0.0) / result.steps


def main() -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    torch.set_num_threads(1)
    parameters = Replica(load_task(TASK, 0).build_model(0)).x.numel()
    print(f"{CORES} cores; milliseconds a step, medians of {ROUNDS} (from, to)")
    print("| strategy | ranks | real | `sim` | ratio |\n| --- | ---: | ---: | ---: | ---: |")
    for strategy in ("allreduce", "server:mode=async", "hogwild"):
        for ranks in [int(word) for word in sys.argv[1:]] or [1, 2, 4]:
            found = [(real(strategy, ranks), foretold(strategy, ranks, parameters)) for _ in range(ROUNDS)]
            cells = [
                f"{1e3 * statistics.median(side):.3f} ({1e3 * min(side):.3f}, {1e3 * max(side):.3f})"
                for side in zip(*found, strict=True)
            ]
            ratio = statistics.median(f for _, f in found) / statistics.median(r for r, _ in found)
            verdict = "" if abs(ratio - 1) <= WITHIN else ", missed"
            print(f"| `{strategy}` | {ranks} | {' | '.join(cells)} | {ratio:.2f}{verdict} |", flush=True)


if __name__ == "__main__":
    main()
