"""A made-up task that needs no files: which class of blob does a point in the plane belong to?"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from hocket.core.errors import UserError
from hocket.tasks.base import Task, refuse_data, task

POINTS, TEST_POINTS = 40_000, 8_000
SIDE, CLASSES, HIDDEN = 4, 4, 64


@task("blobs")
@dataclass(frozen=True)
class Blobs:
    """40,000 points of 16 blobs in 4 classes; two dense layers."""

    name: ClassVar[str]
    noise: float = 0.25
    """Standard deviation of a blob; neighbouring centres are 1 apart."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.noise) and self.noise > 0):
            raise UserError(f"task blobs: noise must be a number above 0; got {self.noise}")

    def make(self, seed: int, data: Path | None) -> Task:
        refuse_data(self.name, data)
        return Task(
            model=_model,
            data=functools.partial(_points, seed, self.noise),
            # The best possible classifier scores 0.93 at the default noise, and less at more noise.
            target=0.91 if self.noise <= Blobs.noise else None,
            epochs=100,
            batch=64,
            lr=0.1,
        )


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def _points(seed: int, noise: float) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Points around the crossings of a square grid, (train, test)."""
    rng = torch.Generator().manual_seed(seed)
    row, column = torch.randint(SIDE, (2, POINTS), generator=rng)
    centres = torch.stack([row, column], dim=1) - (SIDE - 1) / 2
    inputs = centres + noise * torch.randn(POINTS, 2, generator=rng)
    # Neighbours differ in class, and each class is spread over the grid: no straight line parts two of them.
    targets = (row + 2 * column) % CLASSES
    train = POINTS - TEST_POINTS
    return (inputs[:train], targets[:train]), (inputs[train:], targets[train:])
