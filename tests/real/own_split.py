"""A task whose model can be split in every way, for fresh processes to find."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import hocket


def model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 5 * 4, 9), nn.Tanh(),
        nn.Linear(9, 3),
    ).double()  # fmt: skip


def samples() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(48, 1, 10, 8, generator=g).double()
    return x, x[:, 0, :3].sum(1).argmax(-1) % 3


def single() -> nn.Module:
    return model().float()


def rounded() -> tuple[Tensor, Tensor]:
    x, y = samples()
    return x.float(), y


in_single_precision = hocket.Task(model=single, data=(rounded(), rounded()), batch=8, momentum=0.9, lr=0.05)
"""What shared memory has."""
task = hocket.Task(model=model, data=(samples(), samples()), batch=8, momentum=0.9, lr=0.05)
