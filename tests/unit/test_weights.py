"""A gradient counts by the samples that it comes from, also where it is applied by itself."""

from __future__ import annotations

import pytest
import tiny
import torch
from torch import Tensor, nn

SAMPLES, BATCH, LR = 20, 8, 1e-3
"""Two workers take 8 samples each, then 2 each."""
torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))

SERVERS = [f"server:mode={mode},stale=none,lookahead=0" for mode in ("async", "ssp", "dssp")]
SHARED = ["mutex", "hogwild", "leashed", "hogwild:every=2"]


def moved(strategy: str, workers: int, batch: int, engine: str, momentum: float = 0.0) -> Tensor:
    """How far one epoch goes at so small a rate that the gradient hardly changes."""
    made = tiny.task(SAMPLES, batch=batch, model=MODEL)
    result = tiny.fit(made, strategy=strategy, workers=workers, engine=engine, lr=LR, momentum=momentum)
    return torch.cat([(result.state[name] - p.detach()).reshape(-1) for name, p in MODEL.named_parameters()])


@pytest.mark.parametrize(
    ("strategy", "engine"),
    # HOGWILD! may lose what two workers in step write at once
    [(s, "sim") for s in [*SERVERS, *SHARED] if "hogwild" not in s] + [(s, "threads") for s in SHARED],
)
def test_each_sample_moves_the_model_equally_far(strategy: str, engine: str) -> None:
    """By lr / batch: all of them together by 20 / 8 of their mean gradient."""
    mean = moved("serial", 1, SAMPLES, "sim")
    torch.testing.assert_close(
        moved(strategy, 2, BATCH, engine), SAMPLES / BATCH * mean, rtol=0.03, atol=float(mean.abs().max()) / 100
    )


@pytest.mark.parametrize("strategy", [*SERVERS, "mutex"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_worker_alone_steps_as_a_serial_run(strategy: str, momentum: float) -> None:
    """Which takes a small batch as it is."""
    alone, serial = (moved(s, 1, BATCH, "sim", momentum) for s in (strategy, "serial"))
    torch.testing.assert_close(alone, serial)
