"""server:pipeline=1: the next gradient is computed while a push and its answer are on their way."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from torch.nn import functional as F

from hocket.core.errors import UserError
from hocket.core.shard import Shards
from hocket.strategies import strategy

PLAIN = "server:mode=async,stale=none,lookahead=0"
PIPED = f"{PLAIN},pipeline=1"
MADE = tiny.task(48, model=tiny.model, loss=F.cross_entropy, lr=0.1, momentum=0.0, epochs=2)


def test_alone_it_is_sgd_along_the_gradient_before() -> None:
    """x(t+1) = x(t) - lr g(x(t-1)): all updates but the first are one update stale."""
    result = tiny.simulated(MADE, {"compute": "1ms"}, workers=1, strategy=PIPED, seed=3)
    model, train = MADE.build_model(3), MADE.load()[0]
    shards = Shards(48, 1, 4, 3)
    x = before = [p.detach().clone() for p in model.parameters()]
    for step in range(result.steps):
        with torch.no_grad():
            for p, value in zip(model.parameters(), before, strict=True):
                p.copy_(value)
        inputs, targets = train.take(shards.batch(step // shards.steps, step % shards.steps, 0))
        g = torch.autograd.grad(F.cross_entropy(model(inputs), targets), list(model.parameters()))
        before, x = x, [a - 0.1 * b for a, b in zip(x, g, strict=True)]
    for name, value in zip(dict(model.named_parameters()), x, strict=True):
        torch.testing.assert_close(result.state[name], value)
    assert result.staleness["histogram"] == {"0": 1, "1": result.steps - 1}


def test_without_it_nothing_is_stale_for_one_alone() -> None:
    result = tiny.simulated(MADE, {"compute": "1ms"}, workers=1, strategy=f"{PLAIN},pipeline=0", seed=3)
    assert result.staleness["max"] == 0


def times(text: str, **sim: Any) -> float:
    known = {"compute": "10ms", "serve": "0s", "memory": "1000GB", "bandwidth": "1000GB"}
    result = tiny.simulated(MADE, known | sim, workers=1, strategy=text)
    assert result.virtual_seconds is not None
    return result.virtual_seconds / result.steps


@pytest.mark.parametrize("latency_s", [0.001, 0.004, 0.02])
def test_two_gradients_are_under_way_at_once(latency_s: float) -> None:
    """One is computed while the other is on its way there and back."""
    alone_s = 0.010 + 2 * latency_s
    assert times(PLAIN, latency=f"{latency_s}s") == pytest.approx(alone_s, rel=0.1)
    assert times(PIPED, latency=f"{latency_s}s") == pytest.approx(max(0.010, alone_s / 2), rel=0.1)


def test_each_update_is_about_as_many_updates_staler_as_there_are_workers() -> None:
    sim = {"compute": "10ms", "latency": "10us"}
    plain = tiny.simulated(MADE, sim, workers=3, strategy=PLAIN)
    piped = tiny.simulated(MADE, sim, workers=3, strategy=PIPED)
    assert plain.staleness["mean"] == pytest.approx(2, abs=0.5)
    assert piped.staleness["mean"] == pytest.approx(5, abs=1.0)
    assert plain.bytes_sent == piped.bytes_sent


@pytest.mark.parametrize("more", ["", ",stale=gap,lookahead=0.9", ",servers=2", ",stale=delay-compensated"])
@pytest.mark.parametrize("engine", ["sim", "threads"])
def test_it_learns_with_all_that_looks_back(engine: str, more: str) -> None:
    made = tiny.task(240, epochs=4, lr=0.1)
    result = tiny.fit(made, engine=engine, driver="pytorch", workers=3, strategy=f"server:mode=async,pipeline=1{more}")
    assert result.verdict == "finished" and result.test_accuracy is not None and result.test_accuracy > 0.8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("server:mode=sync,pipeline=1", "pipeline=1 is for mode=async"),
        ("server:mode=ssp,pipeline=1", "pipeline=1 is for mode=async"),
        ("server:mode=async,pipeline=1,fetch_every=2", "a push and a read at each step"),
        ("server:mode=async,pipeline=2", "pipeline is 0 or 1, got 2"),
    ],
)
def test_what_cannot_be_is_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        strategy.make(text).check(2)
