"""Steps of one loop, communicating as MODE says: `torchrun ... steps_over.py MODE TASK BATCH STEPS BUCKET_KIB`.

`none` does not communicate, `ddp` and `ddp-whole` are PyTorch's DistributedDataParallel with buckets and with one that
holds the whole model, so that it leaves after the way back, and anything else is a strategy of Hocket's.

Rank 0 prints one JSON line: milliseconds a step, of it forward and backward until the last gradient is there, what
comes after that, what could be hidden of so much, the processor time of each kind of thread, and the accuracy.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp_over import judged
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hocket
from hocket.run.loading import load_task
from hocket.tasks import SampleSet, Task

WARM_UP = 5
"""Steps outside the clock."""
TICKS = 100
"""Of processor time, a second."""


class Steps:
    """The loop, and when the gradient of each parameter was there."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, task: Task) -> None:
        self._model, self._optimizer, self._task = model, optimizer, task
        self._there: list[tuple[float, int]] = []
        self.parts: list[dict[str, float]] = []
        self.arrivals: list[list[tuple[float, int]]] = []
        """Of each step: seconds before the last gradient, and the bytes that came."""
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._seen)

    def _seen(self, parameter: Tensor) -> None:
        self._there.append((time.perf_counter(), parameter.nbytes))

    def take(self, inputs: Tensor, targets: Tensor) -> None:
        self._there.clear()
        began = time.perf_counter()
        loss = self._task.loss(self._model(inputs), targets)
        forward = time.perf_counter()
        loss.backward()
        self._optimizer.step()
        ended = time.perf_counter()
        self._optimizer.zero_grad()
        last = self._there[-1][0]
        self.parts.append({
            "step": ended - began, "forward": forward - began, "backward": last - forward, "after": ended - last
        })  # fmt: skip
        self.arrivals.append([(last - at, nbytes) for at, nbytes in self._there])


def hideable_s(arrivals: list[tuple[float, int]], wire_s: float) -> float:
    """What could be hidden behind the way back of communication that takes `wire_s` in one piece."""
    whole, free = sum(nbytes for _, nbytes in arrivals), -float("inf")
    for before_last, nbytes in arrivals:
        free = max(free, -before_last) + wire_s * nbytes / whole
    return wire_s - max(free, 0.0)


def processor_s() -> Counter[str]:
    """Processor seconds so far by the names of this process's threads, and all that the machine's cores did."""
    found: Counter[str] = Counter()
    for stat in Path("/proc/self/task").glob("*/stat"):
        name, _, rest = stat.read_text().partition(") ")
        fields = rest.split()
        found[name.partition("(")[2]] += (int(fields[11]) + int(fields[12])) / TICKS
    user, nice, system, _, _, irq, soft = map(int, Path("/proc/stat").read_text().split()[1:8])
    found["all programs"] += (user + nice) / TICKS
    found["kernel"] += (system + irq + soft) / TICKS
    return found


def run(steps: Steps, rank: int, size: int, task: Task, batch: int, count: int) -> dict[str, Any]:
    train: SampleSet = task.load()[0]
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[rank::size]
    for number in range(WARM_UP + count):
        if number == WARM_UP:
            before = processor_s()
            steps.parts.clear()
            steps.arrivals.clear()
        steps.take(*train.take(order[number * batch % (len(order) - batch) :][:batch]))
    used = processor_s() - before
    names = steps.parts[0]
    return {
        "ms": {name: 1000 * statistics.median(part[name] for part in steps.parts) for name in names},
        "arrivals": steps.arrivals,
        "processor_ms": {name: round(1000 * used[name] / count, 1) for name in used},
    }


def main(mode: str, name: str, batch: int, count: int, bucket: int) -> None:
    torch.set_num_threads(1)
    task = load_task(name, 0, "", "")
    model = task.build_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=task.momentum)
    if mode in ("none", "ddp", "ddp-whole"):
        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        if mode == "ddp-whole":
            dist._DEFAULT_FIRST_BUCKET_BYTES = 1 << 40
        cap = 1 << 20 if mode == "ddp-whole" else (bucket or 1024) / 1024
        used = model if mode == "none" else DistributedDataParallel(model, bucket_cap_mb=cap)
        found = run(Steps(used, optimizer, task), rank, size, task, batch, count)
    else:
        with hocket.join(strategy=mode) as team:
            rank, size = team.rank, team.size
            model, optimizer = team.prepare(model, optimizer)
            found = run(Steps(model, optimizer, task), rank, size, task, batch, count)
    if rank == 0:
        print(json.dumps(found | {"accuracy": judged(model, task.load()[1], task.metric)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]))
