"""Whether the simulator tells the truth: its step times against real ones, on this machine.

`python bench/simulated.py [RANKS ...] [STRATEGY ...]`, by default 1, 2 and 4 ranks of each. mnist-mlp, batch 64:
all-reduce and the asynchronous server on mpi, HOGWILD! in compiled threads. The simulator is told what was measured a
moment before, and none of the times that it shall foretell: what each rank computes by itself, in the run's own code
and with messages that go through memory but to nobody, while the others compute too; all-reduces, or an empty message
and its answer, while nobody computes; the speed at which threads that write one vector do it. Real and simulated runs
take turns; of each there is the median of ROUNDS, or of as many as begin within MOST_S.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import cycle, product
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import common  # before NumPy is loaded: it sets one BLAS thread
import numpy as np
import torch
from alone import Alone, Loop, Watch
from lost import Case, in_memory

import hocket
from hocket import optim
from hocket.core.clock import RealClock
from hocket.core.comm import Comm, Rank
from hocket.core.errors import NothingCame
from hocket.core.hyperparameters import Hyperparameters
from hocket.core.message import Lossy, Message
from hocket.core.replica import Replica
from hocket.drivers.gradients import WholeModel
from hocket.drivers.own_loop import run_rank, serve_rank
from hocket.drivers.plan import Plan
from hocket.engines.catalogue import Listener, Program, engine
from hocket.engines.sim_costs import collective_s
from hocket.kernels.memory.vector import MappedVector
from hocket.run.loading import load_task
from hocket.run.spec import RunSpec
from hocket.run.train import prepare
from hocket.strategies import strategy as strategies
from hocket.tasks.base import Task, compiled

TASK, BATCH, LR, ROUNDS = "mnist-mlp", 64, 0.01, 3
STEPS, FORETOLD, MEASURED = 400, 100, 200
"""Of a real run, of a simulated one, and of what that is told; those are within an epoch."""
WARM_UP = 20
MOST_S = 180
"""Seconds after which no round begins, but the first of each."""
CORES = len(os.sched_getaffinity(0))
WITHIN = 0.15
FREE = "1000000GB"
"""What moves so many bytes a second takes no time for them."""


def times(
    what: Callable[[], Any], before: Callable[[], Any], clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Seconds of each call, the first ones left out; `before` it comes what is not counted."""
    found = []
    for _ in range(WARM_UP + MEASURED):
        before()
        began = clock()
        what()
        found.append(clock() - began)
    return found[WARM_UP:]


def lognormal(seconds: list[float]) -> str:
    """As an option of the simulator: of this mean, and the spread of the middle two thirds."""
    low, high = np.quantile(np.log(seconds), (1 / 6, 5 / 6))
    sigma = (high - low) / 2
    return f"lognormal:{statistics.mean(seconds) / np.exp(sigma**2 / 2):.9f}s:{sigma:.3f}"


# What ranks of mpi measure.


def step_alone() -> Callable[[], None]:
    """A step of one rank for itself: a gradient, and what the optimizer makes of it."""
    task = load_task(TASK, 0)
    train, _ = task.load()
    replica = Replica(task.build_model(0))
    source = WholeModel(task, replica, train)
    step = optim.step_of(optim.make(task.optimizer, replica, LR, 0.0))
    batches: Iterator[torch.Tensor] = cycle(torch.randperm(len(train)).split(BATCH))

    def one() -> None:
        source.compute(next(batches))
        step()

    return one


def as_worker(here: Rank, plan: Plan, size: int) -> list[float]:
    """Seconds of each step: all that the driver and the strategy compute for it."""
    watch = Watch(here.comm.size > CORES)
    task = dataclasses.replace(load_task(TASK, 0), on_step=lambda progress: watch.lap())
    train, test = task.load()
    answer = Message("model", (0,), (torch.zeros(size_of(task)),))
    alone: Any = Alone(0, size, plan.workers, Loop(watch), lambda: (plan.workers, answer))
    here.comm.barrier()
    run_rank(dataclasses.replace(here, comm=alone, clock=RealClock(), tell=say_nothing), plan, task, train, test)
    for server in range(plan.workers, here.comm.size):
        here.comm.isend(server, Message("done"))
    return watch.found[WARM_UP:]


def as_server(here: Rank, plan: Plan) -> list[float]:
    """Seconds of each push, which come from the workers in turn, for as long as these compute."""
    task, watch = load_task(TASK, 0), Watch(here.comm.size > CORES)
    gradient = torch.full((size_of(task),), 1e-6)
    settings = Hyperparameters(optim.make_flat("sgd", gradient, torch.zeros_like(gradient), LR, 0.0)).told(False)
    read = [0] * plan.workers
    """The version of the parameters that each worker was given last."""
    done = 0

    def made_up() -> tuple[int, Message]:
        nonlocal done
        watch.lap()
        with watch.stopped(), suppress(NothingCame):
            here.comm.recv(timeout=0)
            done += 1
        worker = len(watch.found) % plan.workers
        if done == plan.workers:
            return worker, Message("done")
        return worker, Message("push", (read[worker], BATCH, 1), (Lossy(gradient, "push/0"), settings))

    def note(to: int, msg: Message) -> None:
        read[to] = msg.ints[0]

    alone: Any = Alone(plan.workers, plan.workers + 1, plan.workers, Loop(watch), made_up)
    alone.sent = note
    here.comm.barrier()
    serve_rank(dataclasses.replace(here, comm=alone, clock=RealClock(), tell=say_nothing), plan, task)
    return watch.found[WARM_UP : -plan.workers]


def say_nothing(kind: str, about: dict[str, Any], payload: bytes) -> None:
    pass


def size_of(task: Task) -> int:
    return Replica(task.build_model(0)).x.numel()


def all_reduces(comm: Comm, parameters: int) -> list[float]:
    """Mean seconds of an all-reduce of one and of all parameters, and what of these a rank computed.

    Before each of them a rank takes a step for itself: what travels is then where a step leaves it, not in the caches.
    """
    step, found = step_alone(), []

    def meet_again() -> None:
        step()
        comm.barrier()

    for clock in (time.perf_counter, time.thread_time):
        for x in (torch.zeros(1), torch.zeros(parameters)):
            found.append(statistics.mean(times(partial(comm.all_reduce, x), meet_again, clock)))
    return found


def requests(comm: Comm) -> list[float]:
    """Mean seconds until the last rank has answered an empty message of the first, and what each computed for it: where
    it came to waiting and waking, and without.

    The server is idle while the first takes a step for itself, as in a run. The other workers sleep.
    """
    server, nothing = comm.size - 1, Message("", (), (torch.zeros(1),))
    if comm.rank == server:
        for _ in range(2 * (WARM_UP + MEASURED)):
            comm.isend(0, comm.recv(0)[1])
    if comm.rank > 0:
        comm.recv(0)
        return []

    def ask() -> None:
        comm.isend(server, nothing)
        comm.recv(server)

    step, send = step_alone(), partial(Loop(Watch()).send, nothing)
    asked = ((ask, time.perf_counter), (ask, time.thread_time), (send, time.thread_time))
    found = [statistics.mean(times(what, step, clock)) for what, clock in asked]
    for other in range(1, comm.size):
        comm.isend(other, Message("done")).wait()
    return found


def measured(rank: Rank, argument: dict[str, Any]) -> list[list[float]]:
    """What a rank computes for each step, or push, as in a run, while all others do so too and nobody waits; and what
    they say to each other, while nobody computes."""
    plan = Plan.from_json(argument)
    torch.set_num_threads(1)
    work = as_server(rank, plan) if rank.comm.rank >= plan.workers else as_worker(rank, plan, rank.comm.size)
    rank.comm.barrier()
    comm = rank.comm
    return [work, requests(comm) if comm.size > plan.workers else all_reduces(comm, size_of(load_task(TASK, 0)))]


def mpi_options(strategy: str, workers: int, parameters: int) -> dict[str, str]:
    """What a rank computes, and what ranks say to each other.

    A message's bytes are copied by who sends and who receives it, on the cores that they compute on, so they are in
    what these compute.
    """
    spec = RunSpec(
        TASK, strategy=strategy, engine="mpi", workers=workers, batch=BATCH, lr=LR, momentum=0.0,
        steps=WARM_UP + MEASURED, evaluate_every=1e6, trace=0,
    )  # fmt: skip
    plan, servers = prepare(spec).plan, strategies.make(strategy).server_ranks()
    program = Program("simulated:measured", plan.to_json())
    work, said = zip(*engine.make("mpi").run(program, workers + servers, Listener()), strict=True)
    computed = [seconds for found in work[:workers] for seconds in found]
    if servers:
        return server_options(workers + servers > CORES, computed, work[workers], *said[0])
    return {"memory": FREE} | collective_options(computed, workers, parameters, said)


def server_options(
    crowded: bool, computed: list[float], served: list[float], answered_s: float, handled_s: float, awake_s: float
) -> dict[str, str]:
    """Who waits computes nothing; but where ranks share cores it soon sleeps, and to do so and wake takes its core."""
    more_s = max(handled_s - awake_s, 0.0) if crowded else 0.0
    latency_s = max(answered_s - 2 * (awake_s + more_s), 0.0) / 2
    return {
        "compute": lognormal([seconds + more_s for seconds in computed]),
        "serve": f"{statistics.mean(served) + more_s:.9f}s",
        "latency": f"{latency_s:.9f}s",
        "bandwidth": FREE,
        "memory": FREE,
    }


def collective_options(
    computed: list[float], ranks: int, parameters: int, said: Sequence[list[float]]
) -> dict[str, str]:
    """What `sim` asks for an all-reduce is so many latencies, and its bytes so many times.

    Where ranks share cores, what one computes in it keeps a core from others.
    """
    small_s, large_s, in_small_s, in_large_s = (statistics.mean(found) for found in zip(*said, strict=True))
    if ranks > CORES:
        computed = [seconds + in_large_s for seconds in computed]
        small_s = large_s = max(small_s - in_small_s * ranks / CORES, 0.0)
    told = {"compute": lognormal(computed)}
    if ranks == 1:
        return told
    latencies, sent = (collective_s("all_reduce", 4 * parameters, ranks, *cost) for cost in ((1, 0), (0, 1)))
    bandwidth = sent / max(large_s - small_s, 1e-9) / 1e9
    return told | {"latency": f"{small_s / latencies:.9f}s", "bandwidth": f"{bandwidth:.6f}GB"}


# What threads measure.


def compiled_batches(threads: int) -> list[float]:
    """Seconds that each of so many threads computes for a batch, with a vector of its own."""
    task = load_task(TASK, 0)
    train, _ = task.load()
    replica = Replica(task.build_model(0))
    kernel = compiled(replica.model, task.loss, train)
    assert kernel is not None
    kernel.compile()
    start, found, chosen = Barrier(threads), [0.0] * threads, strategies.make("hogwild")
    own = chosen.compiled_sharing(kernel.dim, threads)
    assert own is not None
    sharing = dataclasses.replace(own, workers=1)

    def run(index: int) -> None:
        vector = MappedVector.create(sharing, replica.x)
        worker = kernel.worker(0, BATCH)
        order = np.random.default_rng(index).permutation(len(train))[: BATCH * STEPS]
        worker.run_epoch(vector, order[: 20 * BATCH], LR)
        vector.control[:] = MappedVector.create(sharing, replica.x).control
        start.wait()
        began = time.thread_time()
        worker.run_epoch(vector, order, LR)
        found[index] = (time.thread_time() - began) / STEPS

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
    own_ns, shared_ns = (in_memory(case, n).update_ns for n in (1, min(threads, CORES)))
    more_s = max(shared_ns - own_ns, 1.0) / 1e9
    return {"compute": f"lognormal:{alone_s:.9f}s:0.1", "memory": f"{3 * 4 * parameters / more_s / 1e9:.6f}GB"}


# The two sides.


def real(strategy: str, ranks: int) -> float:
    where = "threads" if strategy == "hogwild" else "mpi"
    result = hocket.fit(
        TASK, strategy=strategy, engine=where, workers=ranks, batch=BATCH, steps=STEPS, trace=0, lr=LR, progress=False
    )
    return result.seconds / result.steps


def foretold(strategy: str, ranks: int, parameters: int) -> float:
    told = hogwild_options if strategy == "hogwild" else partial(mpi_options, strategy)
    sim: dict[str, Any] = {"cores": CORES, **told(ranks, parameters)}
    result = hocket.fit(
        TASK, strategy=strategy, engine="sim", sim=sim, workers=ranks, batch=BATCH, steps=FORETOLD, trace=0, lr=LR,
        progress=False,
    )  # fmt: skip
    return (result.virtual_seconds or 0.0) / result.steps


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
