"""A loop with one mistake in it, which the argument names."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import hocket
from hocket.engines.local import current


def main(mistake: str) -> None:
    if mistake == "never comes" and (place := current.get()) and place.comm.rank == 1:
        return
    model: nn.Module = nn.Linear(4, 3)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hocket.join("nosuch" if mistake == "misnames" else "allreduce", deadline=600) as team:
        model, optimizer = team.prepare(model, optimizer)
        for step in range(6):
            if step == 4 and team.rank == 1:
                if mistake == "leaves":
                    break
                if mistake == "meets":
                    team.barrier()
            if mistake == "sums":
                team.all_reduce([1])
            if mistake == "loads":
                team.load(Path(__file__))
            optimizer.zero_grad()
            model(torch.ones(8, 4)).sum().backward()
            optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1])
