"""One loop with DDP or with Hocket: `as_ddp.py FILE [ddp]`. Rank 0 writes the parameters that it ends with."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hocket

SIZE, BATCH, ACCUMULATE, STEPS, CLIP = 2, 6, 2, 10, 0.5


def net() -> nn.Sequential:
    generator = torch.Generator().manual_seed(4)
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10), nn.Dropout(0.0)
    model = nn.Sequential(*layers, nn.Linear(10, 3))
    with torch.no_grad():  # ranks that are threads share PyTorch's own generator
        for layer in model:
            for parameter in layer.parameters() if not isinstance(layer, nn.BatchNorm2d) else ():
                parameter.uniform_(-0.3, 0.3, generator=generator)
    return model


def samples(step: int, part: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
    return torch.randn(BATCH, 1, 8, 8, generator=generator), torch.randint(3, (BATCH,), generator=generator)


def train(model: nn.Module, optimizer: Any, rank: int, clip: Callable[..., Any], plain: nn.Module) -> list[float]:
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(ACCUMULATE):
            inputs, targets = samples(step, part, rank)
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(inputs).float(), targets) / ACCUMULATE
            loss.backward()
        clip(plain.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
    return [float(v) for p in plain.parameters() for v in p.detach().flatten()]


def with_ddp() -> tuple[int, list[float]]:
    torch.distributed.init_process_group("gloo")
    plain, rank = net(), torch.distributed.get_rank()
    model = nn.parallel.DistributedDataParallel(plain)
    found = train(model, torch.optim.AdamW(model.parameters(), lr=0.02), rank, nn.utils.clip_grad_norm_, plain)
    torch.distributed.destroy_process_group()
    return rank, found


def with_hocket() -> tuple[int, list[float]]:
    with hocket.join() as team:
        model = net()
        model, optimizer = team.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02))
        return team.rank, train(model, optimizer, team.rank, team.clip_grad_norm_, model)


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, parameters = with_ddp() if "ddp" in sys.argv else with_hocket()
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(parameters))
