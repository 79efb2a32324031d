"""What the tests of overlap run on every rank of every engine."""

from __future__ import annotations

from typing import Any

import torch
from laws import EVEN, NORM, TINY, spec, tiny_data, trained
from torch import nn
from torch.nn import functional as F

from hocket.core.comm import Rank
from hocket.drivers.joining import join
from hocket.tasks import Task

OFF, ON = "allreduce", "allreduce:overlap=on,bucket=1"
"""A KiB: two buckets, the first of which has one and a half layers."""


class Sideways(nn.Module):
    """The first and the last layer take no part in the loss; the middle one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.first, self.twice = nn.Linear(2, 2), nn.Linear(5, 8), nn.Linear(8, 8)
        self.last, self.after = nn.Linear(8, 3), nn.Linear(3, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.tanh(self.twice(torch.tanh(self.twice(self.first(x))))))
        return out


UNUSED = Task(model=Sideways, data=lambda: (tiny_data(), tiny_data()), batch=4, epochs=2, lr=0.1)


def own_loop(text: str, micro: int = 1, forget_grad: bool = False) -> list[float]:
    """A loop of the user's own: batches of different sizes, each in `micro` pieces."""
    x, y = tiny_data()
    with join(strategy=text, seed=3) as team:
        model = UNUSED.build_model(seed=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = team.prepare(model, optimizer)
        for step in range(6):
            if forget_grad:
                for p in model.parameters():
                    p.grad = None
            else:
                optimizer.zero_grad()
            chosen = slice(step * 6 + team.rank, step * 6 + team.rank + 2 + team.rank)
            team.saw(len(x[chosen]))
            for piece in range(1, micro):
                with team.no_sync():
                    F.cross_entropy(model(x[piece : piece + 3]), y[piece : piece + 3]).backward()
            F.cross_entropy(model(x[chosen]), y[chosen]).backward()
            team.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


def run_all(rank: Rank, _: dict[str, Any]) -> dict[str, Any]:
    n = rank.comm.size
    found: dict[str, Any] = {}
    for text in (OFF, ON):
        for name, task in {"tiny": TINY, "norm": NORM, "unused": UNUSED}.items():
            steps = 20 if task is NORM else None
            found[f"{name}/{text}"] = trained(rank, task, spec(n, strategy=text, seed=3, momentum=0.9, steps=steps))
        found[f"pieces/{text}"] = trained(rank, EVEN, spec(n, strategy=text, seed=3, accumulate=3, clip=0.1, steps=9))
        found[f"own/{text}"] = own_loop(text)
        found[f"micro/{text}"] = own_loop(text, micro=3)
        found[f"dropped/{text}"] = own_loop(text, forget_grad=True)
    found["native"] = trained(rank, TINY, spec(n, strategy=f"{ON},algorithm=native", seed=3, momentum=0.9))
    return found
