"""The rules for stale gradients, by their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from hocket.core.staleness import Handling, Staleness

G = torch.tensor([1.0, -2.0, 0.5])
NOW, READ = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([0.0, 1.0, 3.0])


def tempered(handling: Handling, tau: int, workers: int = 3) -> torch.Tensor:
    return Staleness(handling, workers).temper(G, tau, NOW, READ)


@pytest.mark.parametrize(
    ("handling", "factor"),
    [
        ("none", lambda tau: 1.0),
        ("inverse", lambda tau: 1 / (tau + 1)),
        ("max1", lambda tau: 1 / max(1, tau)),
        ("exponential", lambda tau: math.exp(-2 / 4 * math.log(1 + 4 / 2) * tau)),
    ],
)
@pytest.mark.parametrize("tau", [0, 1, 2, 7])
def test_factors(handling: Handling, factor: object, tau: int) -> None:
    torch.testing.assert_close(tempered(handling, tau), G * factor(tau))  # type: ignore[operator]


def test_delay_compensation() -> None:
    torch.testing.assert_close(tempered("delay-compensated", 2), G + 0.04 * G * G * (NOW - READ))


def test_tail_favours_what_is_fresh() -> None:
    """F counts half of the ties: with 3 updates of staleness 0 and one of 4, F(4) = 3.5 / 4."""
    staleness = Staleness("tail", 3)
    for _ in range(3):
        staleness.temper(G, 0, NOW, READ)
    torch.testing.assert_close(staleness.temper(G, 4, NOW, READ), G * (1 + (1 - 2 * 3.5 / 4)))
    staleness.histogram[4] -= 1
    torch.testing.assert_close(staleness.temper(G, 0, NOW, READ), G)
    staleness.histogram[4] += 4
    torch.testing.assert_close(staleness.temper(G, 0, NOW, READ), G * (1 + (1 - 2 * 2.5 / 9)))


def test_gap_divides_where_the_parameters_moved() -> None:
    """gap = (1, 0, 2), mean 1, tau 2: C starts at 0.1 * 0.5."""
    torch.testing.assert_close(tempered("gap", 2), G / (torch.tensor([1.0, 0.0, 2.0]) / 0.05 + 1))
    fresh = Staleness("gap", 3).temper(G, 0, NOW, NOW)
    torch.testing.assert_close(fresh, G)


def test_every_update_is_counted() -> None:
    staleness = Staleness("none", 3)
    for tau in (0, 2, 2):
        staleness.temper(G, tau, NOW, READ)
    assert staleness.histogram == {0: 1, 2: 2}
