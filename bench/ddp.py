"""All-reduce on mpi against PyTorch's DistributedDataParallel on Gloo: mnist-mlp, batch 64 a worker, 2 workers."""

from __future__ import annotations

import socket
import time
from typing import Any

from common import Measured, compare, say_where, speed_of

import hocket
from hocket.tasks import task

BATCH, WORKERS, LR = 64, 2, 0.3


def ddp_rank(rank: int, port: int, speed: Any, accuracy: Any) -> None:
    """One epoch as the PyTorch tutorial has it, on tensors in memory."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional as F
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORKERS)
    recipe = task.make("mnist-mlp").make(0, None)
    train, test = recipe.load()
    model = DistributedDataParallel(recipe.build_model(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[rank::WORKERS]
    dist.barrier()
    began = time.perf_counter()
    for index in order.split(BATCH):
        inputs, targets = train.take(index)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    dist.barrier()
    if rank == 0:
        speed.value = len(train) / (time.perf_counter() - began)
        inputs, targets = test.take(torch.arange(len(test)))
        accuracy.value = float((model.module(inputs).argmax(-1) == targets).float().mean())
    dist.destroy_process_group()


def ddp() -> Measured:
    import torch.multiprocessing as mp

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    speed, accuracy = (mp.get_context("spawn").Value("d", 0.0) for _ in range(2))
    mp.spawn(ddp_rank, (port, speed, accuracy), nprocs=WORKERS)
    return Measured(speed.value, accuracy.value)


def ours() -> Measured:
    return speed_of(
        hocket.fit(
            "mnist-mlp", strategy="allreduce", engine="mpi", workers=WORKERS, batch=BATCH, lr=LR, momentum=0.0,
            epochs=1, trace=0, progress=False,
        )
    )  # fmt: skip


if __name__ == "__main__":
    say_where()
    compare("hocket on mpi", ours, "DDP on Gloo", ddp, "samples/s")
