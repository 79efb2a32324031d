"""All-reduce on mpi against PyTorch's DistributedDataParallel on Gloo: mnist-mlp, batch 64 a worker, 2 workers."""

from __future__ import annotations

import socket
import time
from typing import Any

from common import compare

import hocket
from hocket.tasks import task

BATCH, WORKERS = 64, 2


def ddp_rank(rank: int, port: int, speed: Any) -> None:
    """One epoch as the PyTorch tutorial has it, on tensors in memory."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional as F
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORKERS)
    recipe = task.make("mnist-mlp").make(0, None)
    train, _ = recipe.load()
    model = DistributedDataParallel(recipe.build_model(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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
    dist.destroy_process_group()


def ddp() -> float:
    import torch.multiprocessing as mp

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    speed = mp.get_context("spawn").Value("d", 0.0)
    mp.spawn(ddp_rank, (port, speed), nprocs=WORKERS)
    return speed.value


def ours() -> float:
    result = hocket.fit(
        "mnist-mlp", strategy="allreduce", engine="mpi", workers=WORKERS, batch=BATCH, epochs=1, trace=0, progress=False
    )
    return result.samples_per_s


if __name__ == "__main__":
    compare("hocket on mpi", ours, "DDP on Gloo", ddp, "samples/s")
