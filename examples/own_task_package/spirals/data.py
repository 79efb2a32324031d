"""Points on three spirals, made up on the spot from a fixed seed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

ARMS = 3


def points(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """So many points in the plane, and which arm each lies on."""
    g = torch.Generator().manual_seed(seed)
    arm = torch.randint(ARMS, (count,), generator=g)
    radius = torch.rand(count, generator=g)
    angle = 4 * radius + 2 * math.pi * arm / ARMS + 0.2 * torch.randn(count, generator=g)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arm


def samples() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """What is trained on, and what is tested on in the end."""
    return points(3000, seed=1), points(1000, seed=2)
