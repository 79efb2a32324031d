"""What ranks of `mpi` measure of themselves for the simulator, while they do by themselves what they do in a run.

Nothing here waits for an answer that a run would give, so nothing that the simulator shall foretell is measured.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import cycle
from typing import Any

import torch
from alone import NAP_S, Alone, InTurns, Loop, Watch, clock_of, meet

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
from hocket.run.loading import load_task
from hocket.tasks.base import Task

TASK, BATCH, LR = "mnist-mlp", 64, 0.01
WARM_UP, MEASURED = 20, 200
"""Steps of each rank."""


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


def as_worker(here: Rank, plan: Plan, crowded: bool, at_once: int) -> list[float]:
    """Seconds of each step: all that the driver and the strategy compute for it.

    Workers that meet in a run do so here too after each step, so that the nth step of all is at one time, and waking up
    is a part of it; of those that wait for a server so many compute at once.
    """
    comm = here.comm
    turns = InTurns(comm, plan.workers, at_once)
    if comm.size == plan.workers:
        wait: Callable[[], float | None] = comm.barrier if crowded else partial(meet, comm)
    elif at_once < plan.workers:
        wait = turns.wait
    else:
        wait = partial(time.sleep, NAP_S) if crowded else os.sched_yield
    watch = Watch(clock_of(crowded), wait)
    task = dataclasses.replace(load_task(TASK, 0), on_step=lambda progress: watch.lap())
    train, test = task.load()
    answer = Message("model", (0,), (torch.zeros(size_of(task)),))
    alone: Any = Alone(0, comm.size, plan.workers, Loop(watch), lambda: (plan.workers, answer))
    comm.barrier()
    run_rank(dataclasses.replace(here, comm=alone, clock=RealClock(), tell=say_nothing), plan, task, train, test)
    if wait == turns.wait:
        turns.end()
    for server in range(plan.workers, comm.size):
        comm.isend(server, Message("done"))
    return watch.found[WARM_UP:]


def as_server(here: Rank, plan: Plan, crowded: bool, idle_s: float) -> list[float]:
    """Seconds of each push, which come from the workers in turn, for as long as these compute. In between the server
    waits so long for more."""
    task, watch = load_task(TASK, 0), Watch(clock_of(crowded))
    gradient = torch.full((size_of(task),), 1e-6)
    settings = Hyperparameters(optim.make_flat("sgd", gradient, torch.zeros_like(gradient), LR, 0.0)).told(False)
    read = [0] * plan.workers
    """The version of the parameters that each worker was given last."""
    done = 0

    def made_up() -> tuple[int, Message]:
        nonlocal done
        watch.lap()
        with watch.stopped(), suppress(NothingCame):
            here.comm.recv(timeout=idle_s)
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

    step, send = step_alone(), partial(Loop(Watch(time.thread_time)).send, nothing)
    asked = ((ask, time.perf_counter), (ask, time.thread_time), (send, time.thread_time))
    found = [statistics.mean(times(what, step, clock)) for what, clock in asked]
    for other in range(1, comm.size):
        comm.isend(other, Message("done")).wait()
    return found


def measured(rank: Rank, argument: dict[str, Any]) -> list[list[float]]:
    """What a rank computes for each step, or push, as in a run, while so many others do so too and nobody waits for an
    answer; and what they say to each other, while nobody computes."""
    plan, comm = Plan.from_json(argument["plan"]), rank.comm
    crowded = argument["crowded"]  # a rank that is tied to one core does not see the others
    torch.set_num_threads(1)
    serves = comm.rank >= plan.workers
    given, how = (as_server, "idle_s") if serves else (as_worker, "at_once")
    work = given(rank, plan, crowded, argument[how])
    comm.barrier()
    return [work, requests(comm) if comm.size > plan.workers else all_reduces(comm, size_of(load_task(TASK, 0)))]
