"""Tasks for the tests that save runs and go on with them, and programs that do so on every rank."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hocket
from hocket.core.brake import Brake
from hocket.core.comm import Rank
from hocket.core.status import Status
from hocket.drivers import checkpoint
from hocket.drivers.own_loop import run_rank
from hocket.run.resolve import resolve
from hocket.run.spec import RunSpec
from hocket.strategies import strategy

SAMPLES, BATCH, EPOCHS = 94, 4, 3
"""94 samples in batches of 4: for 1 to 5 workers the last global batch is smaller, and gives nobody a batch of one,
which BatchNorm refuses."""


def samples(count: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(7)
    x = torch.randn(count, 5, generator=g)
    return x, (x @ torch.randn(5, 3, generator=g)).argmax(-1)


def norm() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def dropping() -> nn.Module:
    """With dropout, which draws at random: ranks that are threads share torch's generator, so not for them."""
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))


class Unhurried(nn.Linear):
    """Takes a while for every gradient, so that there is time to end a run in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            time.sleep(0.008)
        return super().forward(x)


def unhurried() -> nn.Module:
    return nn.Sequential(Unhurried(5, 8), nn.Tanh(), nn.Linear(8, 3))


def heavy() -> nn.Module:
    """Whose checkpoints take long to write."""
    return nn.Sequential(nn.Linear(5, 1000), nn.Tanh(), nn.Linear(1000, 1000), nn.Tanh(), nn.Linear(1000, 3))


def perceptron() -> nn.Module:
    """For which there are compiled workers."""
    return nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 3))


SETTINGS: dict[str, Any] = dict(batch=BATCH, epochs=EPOCHS, lr=0.05, momentum=0.9, lr_decay=0.9)
DATA = (samples(SAMPLES), samples(40))

small = hocket.Task(model=norm, data=DATA, **SETTINGS)
random = hocket.Task(model=dropping, data=DATA, **SETTINGS)
slow = hocket.Task(model=unhurried, data=DATA, **SETTINGS | {"epochs": 20})
large = hocket.Task(model=heavy, data=DATA, **SETTINGS | {"epochs": 16})
busy = hocket.Task(model=perceptron, data=(samples(20_000), samples(40)), **SETTINGS | {"epochs": 60, "lr_decay": 1.0})


def usable(case: str, ranks: int) -> bool:
    """Whether so many ranks can run it. A case is a strategy, and behind a bar an optimizer where it is not SGD."""
    chosen = strategy.make(case.partition("|")[0])
    return chosen.fewest_workers <= ranks - chosen.server_ranks() <= chosen.most_workers


def train(rank: Rank, name: str, case: str, steps: int, every: str, resume: str, keep: Path) -> dict[str, Any]:
    """One rank's part in a run of all ranks. Checkpoints go to the folder `keep`."""
    text, _, optimizer = case.partition("|")
    task: hocket.Task = {"small": small, "random": random}[name]
    workers = rank.comm.size - strategy.make(text).server_ranks()
    settings: dict[str, Any] = {"optimizer": optimizer, "momentum": 0.0} if optimizer else {}
    spec = RunSpec(task=name, strategy=text, workers=workers, steps=steps, seed=5, checkpoint_every=every, **settings)
    data = task.load()
    plan = dataclasses.replace(resolve(spec, task, len(data[0])), resume=resume)
    model: list[nn.Module] = []

    def build() -> nn.Module:
        assert callable(task.model)
        model.append(task.model())
        return model[-1]

    def tell(kind: str, data: dict[str, Any], blob: bytes) -> None:
        if kind == "checkpoint":
            checkpoint.write(keep / f"{data['step']:06}", blob)

    fresh = dataclasses.replace(rank, tell=tell, status=Status(), brake=Brake())
    report = run_rank(fresh, plan, dataclasses.replace(task, model=build), *data)
    if rank.comm.rank >= workers:
        return {}
    values = {k: v.tolist() for k, v in model[-1].state_dict().items()}
    return {"model": values, "samples": report["samples"]}


def save_all(rank: Rank, argument: dict[str, Any]) -> dict[str, Any]:
    """Every strategy's run once without a stop, and once as far as `cut` with a checkpoint there."""
    found = {}
    for i, case in enumerate(argument["cases"]):
        if usable(case, rank.comm.size):
            keep = Path(argument["keep"]) / str(i)
            found[case] = train(rank, argument["task"], case, argument["steps"], "", "", keep)
            train(rank, argument["task"], case, argument["cut"], "1000", "", keep)
    return found


def resume_all(rank: Rank, argument: dict[str, Any]) -> dict[str, Any]:
    """Go on with the runs that `save_all` cut off."""
    found = {}
    for i, case in enumerate(argument["cases"]):
        if usable(case, rank.comm.size):
            (saved,) = (Path(argument["keep"]) / str(i)).iterdir()
            found[case] = train(rank, argument["task"], case, argument["steps"], "", str(saved), saved.parent)
    return found
