"""What becomes of an optimizer when replicas are averaged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import on_sim, simulated, task
from torch import nn

from hocket.core.comm import Rank
from hocket.core.replica import Gradient, Replica
from hocket.core.state import Kept
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


def test_push_sum_leaves_with_the_mean_of_what_it_kept() -> None:
    """Each judges z = x / weight, but it is the sum of all x that mixing conserves, whatever the weights."""

    def main(rank: Rank) -> float:
        kept = Kept()
        model = Replica(nn.Linear(1, 1, bias=False))
        model.x.fill_(float(rank.comm.rank))
        optimizer = torch.optim.SGD(model.parameters, lr=0.0)
        worker = Worker(rank.comm, rank.clock, model, optimizer, 5, optimizer.step, kept=kept)
        running = strategy.make("gossip:kind=sgp").worker(worker)
        next(running)
        kept.values["weight"].fill_(0.5 + 0.5 * rank.comm.rank)
        worker.step += 1
        running.send(Gradient(model.g.zero_(), Weight(1, rank.comm.size)))
        with pytest.raises(StopIteration):
            running.send(None)
        return model.x.item()

    assert on_sim(main, 3) == pytest.approx([1.0, 1.0, 1.0])


def drifting(text: str) -> list[list[list[float]]]:
    """The first and the last parameter of three replicas that drift by their rank at each of six steps, and in the
    end."""

    def main(rank: Rank) -> list[list[float]]:
        model = Replica(nn.Linear(6, 1, bias=False))
        model.x.zero_()
        optimizer = torch.optim.SGD(model.parameters, lr=1.0)
        worker = Worker(rank.comm, rank.clock, model, optimizer, 5, optimizer.step)
        running = strategy.make(text).worker(worker)
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

    return on_sim(main, 3)


def test_fragments_of_diloco_take_turns() -> None:
    """Who has its turn is one again, with the mean drift."""
    first, second, third = drifting("diloco:every=4,fragments=2,lr=1,momentum=0")
    assert third == [[2, 2], [4, 2], [6, 4], [4, 6], [6, 8], [8, 6], [6, 6]]
    assert first == [[0, 0], [0, 2], [0, 2], [4, 2], [4, 2], [4, 6], [6, 6]]
    assert second[-1] == [6, 6]


def test_with_a_delay_the_outer_step_of_what_was_sent_comes_later() -> None:
    """At step 4 the mean is 4. Where it comes at step 5, a part of each replica is what it has come to by itself."""
    ends = [[row[0] for row in rows] for rows in drifting("diloco:every=4,lr=1,momentum=0,delay=1,mix=0.5")]
    assert ends == [[0, 0, 0, 0, 2, 2, 4.5 + 1], [1, 2, 3, 4, 4.5, 5.5, 5.5], [2, 4, 6, 8, 7, 9, 5.5]]
    ends = [[row[0] for row in rows] for rows in drifting("diloco:every=4,lr=1,momentum=0,delay=3,mix=0")]
    assert [rows[5] for rows in ends] == [0, 6, 12]  # still under way: the farewell brings it first
    assert [rows[6] for rows in ends] == [4, 4, 4]


def test_a_delay_hides_what_is_sent() -> None:
    slow = {"compute": "1ms", "bandwidth": "1Mbit"}
    waited, hidden = (
        simulated(task(epochs=4), slow, strategy=f"diloco:every=3,delay={delay}", workers=2, steps=11)
        for delay in (0, 2)
    )
    assert hidden.bytes_sent == waited.bytes_sent + 2 * 3 * 4  # samples travel along, three times
    assert hidden.virtual_seconds < waited.virtual_seconds
    assert hidden.per_worker[0]["exposed"] < 0.5 * waited.per_worker[0]["exposed"]


def test_fragments_of_diloco_send_as_much_as_the_whole_in_smaller_portions() -> None:
    whole, parts = (
        simulated(task(epochs=4), {"compute": "1ms"}, strategy=f"diloco:every=3,fragments={f}", workers=2, steps=12)
        for f in (1, 3)
    )
    assert abs(parts.bytes_sent - whole.bytes_sent) <= 2 * 10 * 4 * 2  # but for the farewell of two fragments
