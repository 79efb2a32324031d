"""How near training comes to the limit of one host: mnist-mlp, n ranks, batch 512, 64 and 16 a rank.

`python bench/limit.py [--ranks 1,2] [--batches 512,64,16] [--rounds 3]`. The limit is n processes that exchange
nothing. Against it, in turn and in the same processes: the same loop with a barrier after each step, which is what
steps that wait for the slowest could reach if an exchange took no time; a bare mpi4py loop with a blocking Allreduce,
PyTorch's DistributedDataParallel on Gloo, and Hocket's `allreduce` on `mpi` and `torch`. The first round warms up and
is left out; every round takes 300 steps or more. Speeds are the sum of the ranks' own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import say_where

STEPS = {512: 300, 64: 600, 16: 1000}
LR = 0.1


class Bare:
    """A loop as anybody would write it, with an exchange of gradients in it, or none."""

    def __init__(self, task: Any, samples: Any, rank: int, size: int, wrap: Callable[[Any], Any]) -> None:
        import torch

        self.inputs, self.targets = samples.take(torch.arange(len(samples)))
        self.model = task.build_model(0)
        parameters = list(self.model.parameters())
        self.flat = torch.zeros(sum(p.numel() for p in parameters))
        at = 0
        for p in parameters:
            p.grad = self.flat[at : at + p.numel()].view(p.shape)
            at += p.numel()
        self.optimizer = torch.optim.SGD(parameters, lr=LR)
        self.order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))[rank::size]
        self.wrapped = wrap(self.model)

    def run(self, batch: int, steps: int, exchange: Callable[[Any], None]) -> float:
        """Samples a second."""
        from torch.nn import functional as F

        batches = [index for index in self.order.split(batch) if len(index) == batch]
        began = time.perf_counter()
        for step in range(steps):
            index = batches[step % len(batches)]
            self.optimizer.zero_grad(set_to_none=False)
            F.cross_entropy(self.wrapped(self.inputs[index]), self.targets[index]).backward()
            exchange(self.flat)
            self.optimizer.step()
        return steps * batch / (time.perf_counter() - began)


def ways_on_mpi(make: Callable[[Callable[[Any], Any]], Bare], size: int) -> dict[str, Callable[[int, int], float]]:
    from mpi4py import MPI

    bare = make(lambda model: model)

    def mean(flat: Any) -> None:
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, flat.numpy())
        flat.div_(size)

    return {
        "limit": lambda batch, steps: bare.run(batch, steps, lambda flat: None),
        "bare mpi4py": lambda batch, steps: bare.run(batch, steps, mean),
    }


def ways_on_torch(make: Callable[[Callable[[Any], Any]], Bare], size: int) -> dict[str, Callable[[int, int], float]]:
    from torch.nn.parallel import DistributedDataParallel

    bare, ddp = make(lambda model: model), make(DistributedDataParallel)
    return {
        "limit": lambda batch, steps: bare.run(batch, steps, lambda flat: None),
        "DDP on Gloo": lambda batch, steps: ddp.run(batch, steps, lambda flat: None),
    }


def measure(rank: Any, argument: dict[str, Any]) -> list[list[Any]]:
    """On each rank: [batch, way, round, samples/s, seconds where each went, accuracy]."""
    from hocket.drivers.own_loop import run_rank
    from hocket.drivers.plan import Plan
    from hocket.run.loading import load_task

    plans = {int(batch): Plan.from_json(plan) for batch, plan in argument["plans"].items()}
    some = next(iter(plans.values()))
    task = load_task(some.task, some.seed, some.data, some.test_data)
    train, test = task.load()
    comm = rank.comm

    def make(wrap: Callable[[Any], Any]) -> Bare:
        return Bare(task, train, comm.rank, comm.size, wrap)

    ways = {"mpi": ways_on_mpi, "torch": ways_on_torch}[argument["library"]](make, comm.size)
    alone = make(lambda model: model)
    ways["barrier alone"] = lambda batch, steps: alone.run(batch, steps, lambda flat: comm.barrier())
    found: list[list[Any]] = []
    for turn in range(argument["rounds"] + 1):
        for batch, plan in plans.items():
            for way, run in ways.items():
                comm.barrier()
                speed = run(batch, plan.steps)
                found.append([batch, way, turn, speed, {}, 0.0])
            comm.barrier()
            told = run_rank(rank, plan, task, train, test)
            kinds = ("computing", "sending", "transferring", "waiting")
            where = {kind: told[kind] / told["steps"] * 1e6 for kind in kinds}
            accuracy = told["curve"][-1]["test_accuracy"] if told["curve"] else 0.0
            way = f"hocket on {argument['library']}"
            found.append([batch, way, turn, told["samples"] / told["seconds"], where, accuracy])
    return [entry for entry in found if entry[2] > 0]


def plans(library: str, ranks: int, batches: list[int]) -> dict[str, Any]:
    """What the ranks are to do, decided as `hocket train` decides it."""
    from hocket.run.spec import RunSpec
    from hocket.run.train import prepare

    made = {}
    for batch in batches:
        spec = RunSpec(
            "mnist-mlp", strategy="allreduce", engine=library, workers=ranks, batch=batch, lr=LR, momentum=0.0,
            steps=STEPS.get(batch, 300), evaluate_every=1e6, trace=0,
        )  # fmt: skip
        made[str(batch)] = prepare(spec).plan.to_json()
    return made


def compare(library: str, ranks: int, batches: list[int], rounds: int) -> None:
    from hocket.engines.catalogue import Listener, Program, engine

    began = time.perf_counter()
    argument = {"library": library, "plans": plans(library, ranks, batches), "rounds": rounds}
    by_rank = engine.make(library).run(Program("limit:measure", argument), ranks, Listener())
    for batch in batches:
        speeds: dict[str, list[float]] = {}
        for entries in zip(*by_rank, strict=True):
            if entries[0][0] == batch:
                speeds.setdefault(entries[0][1], []).append(sum(entry[3] for entry in entries))
        limits = speeds["limit"]
        for way, values in speeds.items():
            shares = [value / limit for value, limit in zip(values, limits, strict=True)]
            share = f"{statistics.median(shares):.2f} of it (from {min(shares):.2f} to {max(shares):.2f})"
            print(
                f"{library}, {ranks} ranks, batch {batch}, {way}: {statistics.median(values):,.0f} samples/s, {share}"
            )
        last = [entry for entry in by_rank[0] if entry[0] == batch][-1]
        where = ", ".join(f"{kind} {us:,.0f}" for kind, us in last[4].items())
        print(f"    a step on rank 0, us: {where}; accuracy {last[5]:.4f}")
    print(f"    took {time.perf_counter() - began:.0f} s", flush=True)


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=numbers, default=[1, 2])
    parser.add_argument("--batches", type=numbers, default=[512, 64, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", default="mpi,torch")
    chosen = parser.parse_args()
    here = str(Path(__file__).parent)  # for the ranks to find this file
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    say_where()
    for ranks in chosen.ranks:
        for library in chosen.engines.split(","):
            compare(library, ranks, chosen.batches, chosen.rounds)


if __name__ == "__main__":
    main()
