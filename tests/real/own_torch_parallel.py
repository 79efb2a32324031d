"""The same steps by Hocket's layout and by PyTorch's own tensor and pipeline parallelism, on one process group."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import hocket

STEPS, BATCH, PIECES = 5, 12, 4


def perceptron() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def samples() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(4)
    x = torch.randn(STEPS * BATCH, 5, generator=g).double()
    return x, x[:, :3].argmax(-1)


def batches() -> list[tuple[Tensor, Tensor]]:
    x, y = samples()
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True))


def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def by_dtensor() -> dict[str, Tensor]:
    model: Any = perceptron()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)  # type: ignore[arg-type]
    train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in model.state_dict().items()}


def by_schedule() -> dict[str, Tensor]:
    """1F1B, the first two layers on rank 0; what rank 1 has comes to it in the end."""
    model, rank = perceptron(), dist.get_rank()
    own = copy.deepcopy(model[:2] if rank == 0 else model[2:])
    stage = PipelineStage(own, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, PIECES, loss_fn=F.cross_entropy)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches():
        optimizer.zero_grad()
        schedule.step(x) if rank == 0 else schedule.step(target=y)
        optimizer.step()
    model[2 * rank : 2 + 3 * rank].load_state_dict(own.state_dict())
    for p in model[2:].parameters():
        dist.broadcast(p.data, 1)
    return model.state_dict()


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.allclose(t, b[name], rtol=1e-9, atol=1e-12) for name, t in a.items())


def main() -> None:
    made = perceptron()
    with hocket.join(layout="tensor=2") as team:
        model, optimizer = team.prepare(made, torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9))
        train(model, optimizer)
        whole = team.state_dict()
        others = {"dtensor": by_dtensor(), "schedule": by_schedule()}
        if team.rank == 0:
            for name, state in others.items():
                assert_same(whole, state)
                print(f"{name}: the same")


if __name__ == "__main__":
    main()
