"""The rules for stale gradients, by their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from hocket.core.staleness import Handling, Staleness, by_gap, looked_ahead
from hocket.kernels.memory import tempering

G = torch.tensor([1.0, -2.0, 0.5])
LR = 0.1
NOW, READ = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([0.0, 1.0, 3.0])


def tempered(handling: Handling, tau: int, workers: int = 3) -> torch.Tensor:
    return Staleness(handling, workers, NOW).temper(G, LR, tau, NOW, READ)


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
    staleness = Staleness("tail", 3, NOW)
    for _ in range(3):
        staleness.temper(G, LR, 0, NOW, READ)
    torch.testing.assert_close(staleness.temper(G, LR, 4, NOW, READ), G * (1 + (1 - 2 * 3.5 / 4)))
    staleness.histogram[4] -= 1
    torch.testing.assert_close(staleness.temper(G, LR, 0, NOW, READ), G)
    staleness.histogram[4] += 4
    torch.testing.assert_close(staleness.temper(G, LR, 0, NOW, READ), G * (1 + (1 - 2 * 2.5 / 9)))


def test_gap_divides_where_the_parameters_moved() -> None:
    """By the gap over the step that a parameter usually takes: at first that of this very gradient."""
    gap = (NOW - READ).abs()
    torch.testing.assert_close(tempered("gap", 2), G / (gap / (LR * G.abs()) + 1))
    torch.testing.assert_close(tempered("gap-mean", 2), G / (gap / (LR * (G * G).mean().sqrt()) + 1))


@pytest.mark.parametrize("handling", ["gap", "gap-mean"])
def test_the_gap_counts_not_the_updates_that_made_it(handling: Handling) -> None:
    """Parameters that have not moved divide by 1 after any number of updates, and tau itself plays no part."""
    staleness = Staleness(handling, 3, NOW)
    for tau in (0, 3, 31):
        torch.testing.assert_close(staleness.temper(G, LR, tau, NOW, NOW), G)
        torch.testing.assert_close(tempered(handling, tau), tempered(handling, 1))


def test_the_usual_step_is_the_largest_rate_times_the_rms_of_gradients() -> None:
    """Each parameter's own, before any tempering, and unbiased from the first gradient on."""
    staleness = Staleness("gap", 3, NOW)
    for scale, lr in ((1.0, 0.2), (3.0, 0.1), (2.0, 0.1)):
        staleness.temper(scale * G, lr, 4, NOW, READ)
    rms = G.abs() * math.sqrt((1 + 9 + 4 + 1) / 4)
    torch.testing.assert_close(staleness.temper(G, 0.1, 4, NOW, READ), G / ((NOW - READ).abs() / (0.2 * rms) + 1))


def test_old_gradients_are_forgotten() -> None:
    staleness = Staleness("gap-mean", 3, NOW)
    for scale, times in ((100.0, 10), (1.0, 20_000)):
        for _ in range(times):
            staleness.observe(scale * G, LR)
    assert staleness.mean_square == pytest.approx(float((G * G).mean()), rel=1e-2)


def test_every_update_is_counted() -> None:
    staleness = Staleness("none", 3, NOW)
    for tau in (0, 2, 2):
        staleness.temper(G, LR, tau, NOW, READ)
    assert staleness.histogram == {0: 1, 2: 2}


@pytest.mark.parametrize("step", [1e-12, 0.003, 7.0])
def test_one_pass_over_memory_gives_the_same_bits_as_five(step: float) -> None:
    """Whether a server's engine has Numba loaded must not show in what it learns."""
    rng = torch.Generator().manual_seed(0)
    g, now, read = torch.randn(3, 1003, generator=rng)
    read[::7] = now[::7]
    g[5] = math.nan
    now[6] = math.inf
    before = g.clone(), now.clone(), read.clone()
    one, five = tempering.by_gap(g, now, read, step, torch.empty_like(g)), by_gap(g, now, read, step)
    assert torch.equal(one.view(torch.int32), five.view(torch.int32))
    for a, b in zip((g, now, read), before, strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("ahead", [0.5, 0.9, 1 - 1.6 / 17])
def test_looking_ahead_in_one_pass_gives_the_same_bits_as_in_two(ahead: float) -> None:
    rng = torch.Generator().manual_seed(0)
    for length in (0, 1, 7, 31, 1003):
        now, before = torch.randn(2, length, generator=rng) * torch.randn(2, length, generator=rng).exp()
        kept, own, other = now.clone(), before.clone(), before.clone()
        one, two = tempering.looked_ahead(now, own, ahead), looked_ahead(now, other, ahead)
        assert torch.equal(one, two) and torch.equal(now, kept)
        assert torch.equal(own, now) and torch.equal(other, now), "the next way begins here"
