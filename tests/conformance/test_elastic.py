"""Elastic averaging, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hocket
from hocket.core.comm import Rank
from hocket.core.replica import Gradient, Replica
from hocket.core.serving import Frame, Server
from hocket.core.weight import Weight
from hocket.core.worker import Worker
from hocket.engines.catalogue import Listener, engine
from hocket.strategies import strategy


def pulls(rank: Rank, rounds: int, workers: int, order: str, lr: float = 0.0) -> float:
    """Replicas that start at 1, 2, ... are pulled to and fro, and descend x squared / 2 at the rate lr."""
    chosen = strategy.make(f"elastic:every=1,beta=0.6,order={order}")
    if rank.comm.rank == workers:
        group, x = rank.comm.split(1), torch.zeros(1)
        assert group.size == 1
        optimizer = torch.optim.SGD([nn.Parameter(x)], lr=0.0)
        frame = Frame(show=lambda worker: None, save=lambda: None, load=lambda packed: None)

        def log(event: str, **fields: Any) -> None:
            pass

        chosen.server(Server(rank.comm, rank.clock, workers, x, x, optimizer, optimizer.step, log, frame))
        return x.item()
    model = Replica(nn.Linear(1, 1, bias=False))
    model.x.fill_(rank.comm.rank + 1.0)
    optimizer = torch.optim.SGD(model.parameters, lr=lr)
    worker = Worker(rank.comm.split(0), rank.clock, model, optimizer, 0, optimizer.step, rank.comm)
    steps = chosen.worker(worker)
    next(steps)
    for _ in range(rounds):
        worker.step += 1
        model.g.copy_(model.x)
        steps.send(Gradient(model.g, Weight(1, workers)))
    x = model.x.item()
    try:
        steps.send(None)
    except StopIteration:
        pass
    return x


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_alpha_is_beta_over_the_workers(workers: int) -> None:
    """In turn, d = alpha (x_i - c): x_i -= d, c += d, with alpha = beta / p."""

    def main(rank: Rank) -> Any:
        return pulls(rank, 4, workers, "round-robin")

    *found, centre_found = engine.make("sim").run(main, workers + 1, Listener())
    alpha, centre, x = 0.6 / workers, 0.0, [i + 1.0 for i in range(workers)]
    for _ in range(4):
        for i in range(workers):
            d = alpha * (x[i] - centre)
            x[i], centre = x[i] - d, centre + d
    assert found == pytest.approx(x, rel=1e-5)
    assert centre_found == pytest.approx(centre, rel=1e-5)


def test_gradient_and_pull_set_out_from_one_place() -> None:
    """x <- x - lr g(x) - alpha (x - c), and the centre is pulled to the x before (Zhang 2015, equations 5 and 6)."""

    def main(rank: Rank) -> Any:
        return pulls(rank, 3, 1, "async", lr=0.5)

    found, centre_found = engine.make("sim").run(main, 2, Listener())
    x, centre = 1.0, 0.0
    for _ in range(3):
        x, centre = x - 0.5 * x - 0.6 * (x - centre), centre + 0.6 * (x - centre)
    assert (found, centre_found) == (pytest.approx(x), pytest.approx(centre))


@pytest.mark.parametrize("order", ["async", "round-robin"])
def test_a_slow_worker_and_finished_ones_hold_nobody_up_for_ever(order: str) -> None:
    result = hocket.fit(
        "digits", strategy=f"elastic:order={order}", engine="sim", workers=4, epochs=10, progress=False,
        sim={"stragglers": "1x5"},
    )  # fmt: skip
    assert result.test_accuracy is not None
    assert result.test_accuracy > 0.9
