"""A gradient counts by the samples that it comes from, also where it is applied by itself."""

from __future__ import annotations

import pytest
import tiny
import torch
from torch import Tensor, nn

from hocket.strategies import strategy

SAMPLES, BATCH, LR = 20, 8, 1e-3
"""Two workers take 8 samples each, then 2 each."""
torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))

SERVERS = [f"server:mode={mode},stale=none,lookahead=0" for mode in ("async", "ssp", "dssp")]
SHARED = ["mutex", "hogwild", "leashed", "hogwild:every=2"]


def moved(text: str, workers: int, batch: int, engine: str, momentum: float = 0.0) -> Tensor:
    """How far one epoch goes at so small a rate that the gradient hardly changes."""
    made = tiny.task(SAMPLES, batch=batch, model=MODEL)
    result = tiny.fit(made, strategy=text, workers=workers, engine=engine, lr=LR, momentum=momentum)
    return torch.cat([(result.state[name] - p.detach()).reshape(-1) for name, p in MODEL.named_parameters()])


@pytest.mark.parametrize(
    ("text", "engine"),
    # In real threads HOGWILD! may lose what two workers write at once
    [(s, "sim") for s in [*SERVERS, *SHARED]] + [(s, "threads") for s in ("mutex", "leashed")],
)
def test_each_sample_moves_the_model_equally_far(text: str, engine: str) -> None:
    """By lr / batch: all of them together by 20 / 8 of their mean gradient."""
    mean = moved("serial", 1, SAMPLES, "sim")
    torch.testing.assert_close(
        moved(text, 2, BATCH, engine), SAMPLES / BATCH * mean, rtol=0.03, atol=float(mean.abs().max()) / 100
    )


@pytest.mark.parametrize("text", [*SERVERS, "mutex"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_worker_alone_steps_as_a_serial_run(text: str, momentum: float) -> None:
    """Which takes a small batch as it is."""
    alone, serial = (moved(s, 1, BATCH, "sim", momentum) for s in (text, "serial"))
    torch.testing.assert_close(alone, serial)


AVERAGING = ["allreduce", "local-sgd", "gossip", "gossip:kind=sgp", "server:mode=sync"]


@pytest.mark.parametrize("text", ["serial", *AVERAGING, *SERVERS, "mutex"])
def test_a_sample_moves_the_model_as_far_as_the_strategy_says(text: str) -> None:
    """Over one epoch of full batches, at so small a rate that the gradient hardly changes."""
    workers = 1 if text == "serial" else 2
    serial = moved("serial", 1, 5, "sim")
    expected = strategy.make(text).step_scale(workers) * serial
    torch.testing.assert_close(moved(text, workers, 5, "sim"), expected, rtol=0.03, atol=float(serial.abs().max()) / 50)


def test_the_scale_of_an_outer_momentum_is_all_that_it_comes_to() -> None:
    assert strategy.make("diloco:lr=0.7,momentum=0.9").step_scale(4) == pytest.approx(7 / 4)
