"""DDP on a task of Hocket's, as the PyTorch tutorial has it: `torchrun ... ddp_over.py TASK TARGET [KEY=VALUE...]`.

Rank 0 prints one JSON line: seconds until the test accuracy was at the target, looked at ten times an epoch outside the
clock, and the accuracy.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hocket.run.loading import load_task
from hocket.tasks import SampleSet

LOOKS = 10
"""In an epoch."""


def main(name: str, target: float, **settings: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    task = load_task(name, 0, "", "")
    train, test = task.load()
    batch, lr = int(settings.get("batch", task.batch)), float(settings.get("lr", task.lr))
    model = DistributedDataParallel(task.build_model(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=float(settings.get("momentum", task.momentum)))
    steps = len(train) // (batch * size)
    every = max(steps // LOOKS, 1)
    seconds, accuracy = 0.0, 0.0
    for epoch in range(int(settings.get("epochs", task.epochs))):
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))[rank::size]
        for step, index in enumerate(order.split(batch)[:steps], 1):
            began = time.perf_counter()
            inputs, targets = train.take(index)
            optimizer.zero_grad()
            task.loss(model(inputs), targets).backward()
            optimizer.step()
            seconds += time.perf_counter() - began
            if step % every == 0:
                accuracy = judged(model.module, test, task.metric)
                if accuracy >= target:
                    break
        if accuracy >= target:
            break
    if rank == 0:
        reached = seconds if accuracy >= target else None
        print(json.dumps({"time_to_target": reached, "accuracy": accuracy, "seconds": seconds}), flush=True)
    dist.destroy_process_group()


def judged(model: torch.nn.Module, test: SampleSet, metric: Callable[..., Any]) -> float:
    model.eval()
    with torch.no_grad():
        parts = [test.take(index) for index in torch.arange(len(test)).split(2048)]
        right = sum(float(metric(model(x), y)) * len(y) for x, y in parts)
    model.train()
    return right / len(test)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), **dict(word.split("=", 1) for word in sys.argv[3:]))
