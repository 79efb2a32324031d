"""What becomes of an optimizer when replicas are averaged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import on_sim, simulated, task
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


def test_fragments_of_diloco_take_turns() -> None:
    """Replicas drift apart by their rank at each step; who has its turn is one again, with the mean drift."""

    def main(rank: Rank) -> list[list[float]]:
        model = Replica(nn.Linear(6, 1, bias=False))
        model.x.zero_()
        optimizer = torch.optim.SGD(model.parameters, lr=1.0)
        worker = Worker(rank.comm, rank.clock, model, optimizer, 5, optimizer.step)
        running = strategy.make("diloco:every=4,fragments=2,lr=1,momentum=0").worker(worker)
        next(running)
        found = []
        for _ in range(6):
            worker.step += 1
            model.g.fill_(-float(rank.comm.rank))
            running.send(Gradient(model.g, Weight(1, rank.comm.size)))
            found.append([model.x[0].item(), model.x[-1].item()])
        with pytest.raises(StopIteration):
            running.send(None)
        return [*found, [model.x[0].item(), model.x[-1].item()]]

    first, second, third = on_sim(main, 3)  # they drift by 0, 1 and 2: by 1 on average
    assert third == [[2, 2], [4, 2], [6, 4], [4, 6], [6, 8], [8, 6], [6, 6]]
    assert first == [[0, 0], [0, 2], [0, 2], [4, 2], [4, 2], [4, 6], [6, 6]]
    assert second[-1] == [6, 6]


def test_fragments_of_diloco_send_as_much_as_the_whole_in_smaller_portions() -> None:
    whole, parts = (
        simulated(task(epochs=4), {"compute": "1ms"}, strategy=f"diloco:every=3,fragments={f}", workers=2, steps=12)
        for f in (1, 3)
    )
    assert abs(parts.bytes_sent - whole.bytes_sent) <= 2 * 10 * 4 * 2  # but for the farewell of two fragments
