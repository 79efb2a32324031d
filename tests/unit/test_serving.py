"""What a server makes of the words of its workers, in whatever order they come."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hocket.core import staleness
from hocket.core.clock import RealClock
from hocket.core.hyperparameters import Hyperparameters
from hocket.core.message import Message
from hocket.core.serving import Frame, Server
from hocket.kernels.memory import tempering
from hocket.strategies import strategy
from hocket.strategies.pace import Pace
from hocket.strategies.views import Views


class Script:
    """A Comm on which everything that comes in is known beforehand."""

    def __init__(self, words: list[tuple[int, Message]]) -> None:
        self._words = iter(words)
        self.sent: list[tuple[int, str]] = []

    def recv(self, *_: Any) -> tuple[int, Message]:
        return next(self._words)

    def isend(self, to: int, msg: Message, tag: int = 0) -> Any:
        self.sent.append((to, msg.kind))
        return Done()


class Done:
    def wait(self) -> None:
        pass


@pytest.mark.parametrize("looked_ahead", [staleness.looked_ahead, tempering.looked_ahead])
@pytest.mark.parametrize("pipeline", [0, 1])
def test_each_worker_has_views_of_its_own(looked_ahead: staleness.LookedAhead, pipeline: int) -> None:
    """What one is given changes neither what others read, nor what it was given before."""
    x = torch.zeros(3)
    views = Views(0.5, x, 2, pipeline, looked_ahead)
    x += 1
    first = views.given(0, x)
    assert first.tolist() == [1.5] * 3, "half as far again as since the start"
    x += 1
    second = views.given(0, x)
    assert second.tolist() == [2.5] * 3 and views.given(1, x).tolist() == [3.0] * 3
    assert first.tolist() == [1.5] * 3
    assert views.pushed(0).tolist() == (first if pipeline else second).tolist()


def test_a_step_waits_for_all_after_a_pause() -> None:
    """Worker 1 comes back from it, and pushes, before worker 0's word of its return arrives."""
    x, g = torch.zeros(1), torch.zeros(1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(x)], lr=1.0)

    def push(value: float) -> Message:
        return Message("push", (0, 1, 1), (torch.tensor([value]), Hyperparameters(optimizer).told()))

    steps: list[float] = []
    words = [
        (0, Message("away")), (1, Message("away")),
        (1, Message("back")), (1, push(2.0)), (0, Message("back")), (0, push(4.0)),
        (0, Message("away")), (1, Message("away")), (0, Message("back")), (1, Message("back")),
        (1, Message("done")), (0, Message("done")),
    ]  # fmt: skip
    comm: Any = Script(words)
    frame = Frame(show=lambda worker: None, save=lambda: None, load=lambda packed: None)
    server = Server(comm, RealClock(), 2, x, g, optimizer, lambda: steps.append(g.item()), lambda *_, **__: None, frame)
    strategy.make("server:mode=sync").server(server)
    assert steps == [3.0]
    assert comm.sent == [(0, "model"), (1, "model")] * 2


def test_a_dynamic_slack_does_not_foresee_from_the_start_up() -> None:
    """Both push first 100 s after the clock began; who is ahead is granted more only when two intervals are known."""
    x = torch.zeros(1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(x)], lr=1.0)
    frame = Frame(show=lambda worker: None, save=lambda: None, load=lambda packed: None)
    comm: Any = Script([])
    server = Server(comm, RealClock(), 2, x, x, optimizer, lambda: None, lambda *_, **__: None, frame)
    pace = Pace(server, low=0, high=4)
    for worker, now_s in ((1, 100.0), (0, 100.1), (0, 101.1)):
        pace.pushed(worker, now_s)
    assert pace.interval_s == [pytest.approx(1.0), 0.0]
    assert not pace.may_go_on(0)
    for worker, now_s in ((1, 103.0), (0, 103.1), (0, 104.1)):
        pace.pushed(worker, now_s)
    assert pace.interval_s == [pytest.approx(1.0), pytest.approx(3.0)]
    assert pace.may_go_on(0), "the next push of the slow one is two steps away"
