"""A task that trains in milliseconds, and how to run it, for the tests in this folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import hocket
from hocket.core.comm import Rank
from hocket.engines.catalogue import Listener
from hocket.engines.sim import Sim
from hocket.engines.threads import Threads

PARAMETERS = 10


def samples(count: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(7)
    x = torch.randn(count, 4, generator=g)
    return x, (x[:, 0] > 0).long()


def model() -> nn.Module:
    return nn.Linear(4, 2)


def task(count: int = 24, **settings: Any) -> hocket.Task:
    chosen = {"model": model, "batch": 4, "epochs": 1} | settings
    return hocket.Task(data=(samples(count), samples(12)), **chosen)


def fit(made: hocket.Task, **settings: Any) -> hocket.Result:
    return hocket.fit(made, **{"engine": "threads", "progress": False} | settings)


def simulated(made: hocket.Task, sim: dict[str, Any], **settings: Any) -> hocket.Result:
    return fit(made, engine="sim", sim=sim, **settings)


def on_threads(main: Callable[[Rank], Any], size: int) -> list[Any]:
    return Threads(deadline=20).run(main, size, Listener())


def on_sim(main: Callable[[Rank], Any], size: int, **options: Any) -> list[Any]:
    return Sim(**options).run(main, size, Listener())


def three_classes() -> tuple[Tensor, Tensor]:
    """240 samples of 5 numbers, which a linear model tells apart."""
    g = torch.Generator().manual_seed(7)
    x = torch.randn(240, 5, generator=g)
    return x, (x @ torch.randn(5, 3, generator=g)).argmax(-1)


def net() -> nn.Sequential:
    """The same on every rank, also where ranks are threads that share PyTorch's generator."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.5, 0.5, generator=generator)
    return model


class Odd(nn.Module):
    """A model that no compiled workers are known for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * 1.0
        return out
