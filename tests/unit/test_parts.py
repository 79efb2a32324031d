"""A gradient says when each of its parts is complete, so that a part can leave while the rest is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import tiny
import torch
from torch import nn
from torch.nn import functional as F

from hocket.core.comm import Request
from hocket.core.replica import Part, Replica
from hocket.core.worker import Need, Steps, Strategy, Worker, strategy
from hocket.drivers.gradients import WholeModel


class Sideways(nn.Module):
    """The last layer takes no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.relu(self.first(x)))
        return out


def test_parts_cover_the_gradient_and_come_in_the_order_of_backward() -> None:
    made = tiny.task(model=Sideways)
    replica = Replica(Sideways())
    train, _ = made.load()
    source, seen = WholeModel(made, replica, train), []
    complete: list[torch.Tensor] = []

    def ready(part: Part) -> None:
        seen.append(part)
        complete.append(replica.g[part.span].clone())

    source.compute(torch.arange(8), ready)
    assert seen == replica.parts and [part.number for part in seen] == list(range(6))
    assert [part.span.start for part in seen] == sorted((part.span.start for part in seen), reverse=True)
    assert sum(part.span.stop - part.span.start for part in seen) == replica.x.numel()
    assert seen[-1].done == 1
    for part, values in zip(seen, complete, strict=True):
        assert torch.equal(values, replica.g[part.span]), "what was announced does not change any more"
    before = replica.g.clone()
    source.compute(torch.arange(8), None)
    assert torch.equal(before, replica.g)


def test_a_worker_without_samples_announces_its_zeros() -> None:
    made = tiny.task()
    replica, seen = Replica(tiny.model()), []
    WholeModel(made, replica, made.load()[0]).compute(torch.arange(0), seen.append)
    assert seen == replica.parts and not replica.g.any()


@pytest.fixture
def overlapped(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(strategy, "_classes", dict(strategy._classes))

    @strategy("overlapped")
    @dataclass(frozen=True)
    class Overlapped(Strategy):
        """All-reduce of each part as soon as it is complete; for batches that are all alike."""

        @property
        def needs(self) -> frozenset[Need]:
            return frozenset({"collectives"})

        def worker(self, w: Worker) -> Steps:
            on_the_way: list[Request] = []
            w.on_part = lambda part: on_the_way.append(w.comm.iall_reduce(w.model.g[part.span], "mean"))
            while (g := (yield)) is not None:
                while on_the_way:
                    on_the_way.pop(0).wait()
                w.descend(g)
            w.average_buffers()

    yield "overlapped"


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)), nn.Linear(4, 2))


def test_in_the_simulator_a_part_leaves_while_the_rest_is_computed(overlapped: str) -> None:
    """The way back takes 10 ms, and so does the way over the wire; of that, only the last part's is left to be seen."""
    made = tiny.task(48, model=deep, loss=F.cross_entropy, lr=0.1)
    network: dict[str, Any] = {"compute": "15ms", "latency": "0s", "bandwidth": "68KB"}
    plain = tiny.simulated(made, network, workers=2, strategy="allreduce")
    hidden = tiny.simulated(made, network, workers=2, strategy=overlapped)
    for name, tensor in plain.state.items():
        torch.testing.assert_close(hidden.state[name], tensor)
    steps, vector_s = plain.steps, 4 * plain.parameters / 68_000
    last_s = 4 * (4 * 4) / 68_000  # the first layer's weights are complete last
    assert plain.virtual_seconds == pytest.approx(steps * (0.015 + vector_s))
    assert hidden.virtual_seconds == pytest.approx(steps * (0.015 + last_s))
    assert hidden.bytes_sent == plain.bytes_sent


def test_charging_part_by_part_takes_as_long_as_at_once() -> None:
    """A third is the way there; parts are complete on the way back."""

    def main(rank: Any) -> list[float]:
        began = rank.clock.now()
        times = []
        for done in (0.0, 0.25, 0.5, 1.0):
            rank.clock.charge(0.5, done)
            times.append(rank.clock.now() - began)
        rank.clock.charge(0.5)
        return [*times, rank.clock.now() - began]

    (times,) = tiny.on_sim(main, 1, compute="12ms")
    assert times == pytest.approx([0.002, 0.003, 0.004, 0.006, 0.012])
