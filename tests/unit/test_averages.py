"""What becomes of an optimizer when replicas are averaged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import on_sim
from torch import nn

from hocket.core.comm import Rank
from hocket.core.replica import Gradient, Replica
from hocket.core.weight import Weight
from hocket.core.worker import Worker
from hocket.strategies import strategy


def ends(rank: Rank, text: str, steps: int, make: Any, pull: float) -> float:
    """One parameter that starts at the rank's number, after so many steps along `pull` and the farewell."""
    model = Replica(nn.Linear(1, 1, bias=False))
    model.x.fill_(float(rank.comm.rank))
    optimizer = make(model.parameters)
    worker = Worker(rank.comm, rank.clock, model, optimizer, 5, optimizer.step)
    running = strategy.make(text).worker(worker)
    next(running)
    for _ in range(steps):
        worker.step += 1
        model.g.fill_(pull)
        running.send(Gradient(model.g, Weight(1, rank.comm.size)))
    with pytest.raises(StopIteration):
        running.send(None)
    return model.x.item()


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam], ids=lambda m: m.__name__)
def test_an_optimizer_that_is_reset_counts_its_steps_anew(make: Any) -> None:
    """Under one constant gradient 40 steps of the reset optimizer are ten times four of a fresh one."""

    def main(rank: Rank) -> float:
        return ends(rank, "local-sgd:every=4,momentum=reset", 40, lambda p: make(p, lr=0.01), 1.0)

    def fresh(rank: Rank) -> float:
        return ends(rank, "serial", 4, lambda p: make(p, lr=0.01), 1.0)

    assert on_sim(main, 1)[0] == pytest.approx(10 * on_sim(fresh, 1)[0], rel=1e-4)
