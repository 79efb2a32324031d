"""Scikit-learn's handwritten digits: small, real, and installed with it."""

from __future__ import annotations

import gzip
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from hocket.core.errors import UserError
from hocket.tasks.base import Task, refuse_data, task

PIXELS, HIDDEN, CLASSES = 64, 64, 10
TEST_SAMPLES = 360


@task("digits")
@dataclass(frozen=True)
class Digits:
    """1,797 handwritten digits of 8x8 pixels, from scikit-learn; two dense layers."""

    name: ClassVar[str]

    def make(self, seed: int, data: Path | None) -> Task:
        refuse_data(self.name, data)
        return Task(model=_model, data=_digits, target=0.95, epochs=30, batch=32, lr=0.1, momentum=0.9)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def _digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(train, test), split the same way whatever the seed of the run."""
    text = gzip.decompress(_file().read_bytes()).decode()
    table = torch.from_numpy(np.fromstring(text.replace("\n", ","), dtype=np.float32, sep=","))
    table = table.view(-1, PIXELS + 1)
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    inputs, targets = table[:, :PIXELS] / 16, table[:, PIXELS].long()
    train = len(table) - TEST_SAMPLES
    return (inputs[:train], targets[:train]), (inputs[train:], targets[train:])


def _file() -> Path:
    """The table inside the scikit-learn package, which is not imported: that would take a second a rank."""
    spec = importlib.util.find_spec("sklearn")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder, "datasets", "data", "digits.csv.gz")
        if path.is_file():
            return path
    raise UserError("task digits reads the data that ships with scikit-learn; run: pip install scikit-learn")
