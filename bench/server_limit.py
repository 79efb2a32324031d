"""What an asynchronous server on one host could reach at best: mnist-mlp, batch 512, compiled loops and nothing else.

`python bench/server_limit.py [WORKERS [ROUNDS]]`, by default 2 and 5. A worker adds its gradient to its momentum on the
way into shared memory, sleeps, and copies the parameters out. The server is one compiled loop: a pass over the gradient
for its mean square, and one in which it is tempered, applied and looked ahead from. In turn with it, in the same
processes: worker 0 alone, which steps for itself.
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from common import say_where
from limit import LR, Bare
from numba import njit

from hocket.kernels.memory.atomics import fetch_add, load, store
from hocket.kernels.memory.futex import sleep_while, wake

BATCH, STEPS, AHEAD, LINE, NS = 512, 300, np.float32(0.9), 16, 1_000_000_000


@njit(fastmath=True)
def exchange(words: Any, me: int, bell: int, g: Any, velocity: Any, gradient: Any, view: Any, x: Any) -> None:
    """A worker's push, its wait, and its read."""
    for i in range(len(g)):
        velocity[i] += (np.float32(1) - AHEAD) * (g[i] - velocity[i])
        gradient[i] = velocity[i]
    store(words, me * LINE, 1)
    fetch_add(words, bell, 1)
    wake(words, bell)
    while load(words, me * LINE):
        sleep_while(words, me * LINE, 1, NS, me * LINE + 2)
    x[:] = view


@njit(fastmath=True)
def serve(words: Any, bell: int, gradients: Any, views: Any, x: Any, true: Any, lr: Any, pushes: int) -> None:
    """The server's life."""
    mean_square, seen = np.float32(0), 0
    while seen < pushes:
        before = load(words, bell)
        for worker in range(len(views)):
            if load(words, worker * LINE):
                g, view, read, square = gradients[worker], views[worker], true[worker], np.float32(0)
                for i in range(len(x)):
                    square += g[i] * g[i]
                seen += 1
                mean_square += (square / np.float32(len(x)) - mean_square) / np.float32(min(seen, 1000))
                usual = lr * np.sqrt(mean_square) + np.float32(1e-12)
                for i in range(len(x)):
                    now = x[i] - lr * g[i] / (abs(x[i] - view[i]) / usual + np.float32(1))
                    view[i] = now + AHEAD * (now - read[i])
                    x[i] = read[i] = now
                store(words, worker * LINE, 0)
                wake(words, worker * LINE)
        sleep_while(words, bell, before, NS, bell + 2)


def measure(rank: Any, rounds: int) -> list[tuple[float, float]]:
    """Of each round, the samples/s with the server, and of worker 0 alone."""
    import torch

    from hocket.engines.mapped import map_together
    from hocket.run.loading import load_task

    comm, workers = rank.comm, rank.comm.size - 1
    task = load_task("mnist-mlp", 0, os.environ.get("HOCKET_DATA", "data"), None)
    me, bare = comm.rank, Bare(task, task.load()[0], comm.rank, workers, lambda model: model)
    own = list(bare.model.parameters())
    x, at = torch.cat([p.detach().view(-1) for p in own]), 0
    for p in own:
        p.data = x[at : at + p.numel()].view(p.shape)
        at += p.numel()
    bell, first = workers * LINE, (workers + 1) * LINE
    block = map_together(comm, 8 * first + 8 * workers * at, lambda block: None)
    words = np.frombuffer(block.memory, np.int64, first)
    gradients, views = np.frombuffer(block.memory, np.float32, offset=8 * first).reshape(2, workers, at)
    stepping, absent = bare.optimizer, SimpleNamespace(zero_grad=bare.optimizer.zero_grad, step=lambda: None)
    velocity, found = np.zeros(at, np.float32), []
    for turn in range(rounds + 1):
        steps, speed, alone = STEPS if turn else 10, 0.0, 0.0  # the first compiles
        if me == workers:
            views[:] = x.numpy()
        comm.barrier()
        if me == workers:
            serve(words, bell, gradients, views, x.numpy(), views.copy(), np.float32(LR), steps * workers)
        else:
            bare.optimizer = absent
            push = (velocity, gradients[me], views[me], x.numpy())
            speed = bare.run(BATCH, steps, lambda flat, push=push: exchange(words, me, bell, flat.numpy(), *push))
        comm.barrier()
        if me == 0:
            bare.optimizer = stepping
            alone = bare.run(BATCH, steps, lambda flat: None)
        comm.barrier()
        found.append((speed, alone))
    return found[1:]


if __name__ == "__main__":
    from hocket.engines.catalogue import Listener, Program, engine

    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    say_where()
    workers, rounds = [int(word) for word in (*sys.argv[1:], *("2", "5")[len(sys.argv) - 1 :])]
    by_rank = engine.make("mpi").run(Program("server_limit:measure", rounds), workers + 1, Listener())
    both = [(sum(rank[i][0] for rank in by_rank), by_rank[0][i][1]) for i in range(rounds)]
    speed, alone, ratio = (sorted(values) for values in zip(*[(a, b, a / b) for a, b in both], strict=True))
    shown = f"{statistics.median(ratio):.3f} (from {ratio[0]:.3f} to {ratio[-1]:.3f}, {rounds} rounds)"
    print(f"{workers} workers and a compiled server: {statistics.median(speed):,.0f} samples/s")
    print(f"one worker alone: {statistics.median(alone):,.0f} samples/s; ratio: {shown}")
