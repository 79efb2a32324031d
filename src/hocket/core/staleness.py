"""What to do with a gradient that was computed at parameters which have changed since.

Each rule is one function that gives the gradient to apply in place of `g`. It takes numbers as well as tensors, and
the loops of `hocket.kernels` compile these very functions.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Literal, TypeVar

from torch import Tensor

from hocket.core.state import State

Handling = Literal["none", "inverse", "max1", "exponential", "tail", "gap", "delay-compensated"]
Number = TypeVar("Number", float, Tensor)

SMALLEST_STEP = 1e-12
"""The mean step is taken to be this long at least: nothing has moved yet where it is shorter."""


def needs_the_read(handling: Handling) -> bool:
    """Whether a rule must know the parameters that were read."""
    return handling in ("gap", "delay-compensated")


def inverse(g: Number, tau: int) -> Number:
    """Divided by tau + 1, tau being the gradient's staleness."""
    return g / (tau + 1)


def max1(g: Number, tau: int) -> Number:
    """Staleness-aware SGD (Zhang 2016): divided by tau, but for fresh gradients."""
    return g / max(1, tau)


def exponential(g: Number, tau: int, workers: int) -> Number:
    """FLeet (Damaskinos 2020): times exp(-beta tau), with the paper's threshold theta at workers + 1."""
    theta = workers + 1
    return g * math.exp(-2 / theta * math.log(1 + theta / 2) * tau)


def tail(g: Number, below: float) -> Number:
    """Bäckström 2022: times 1 + A (1 - 2 F(tau)), A = 1; `below` is F(tau), the share of updates that are less stale.

    Half of the ties count, so that the mean factor is 1, also where all updates are equally stale.
    """
    return g * (2 - 2 * below)


def gap_aware(g: Number, gap: Number, mean_step: float) -> Number:
    """Gap-aware SGD (Barkai 2020): g / (gap / C + 1), where gap is |now - read| and C the mean step."""
    steps = gap / mean_step
    steps += 1
    return g / steps


def mean_step_after(mean_step: float, mean_gap: float, tau: int) -> float:
    """Gap-aware SGD's C, a running mean of how far one update moves a parameter, after a gap of tau > 0 updates."""
    return mean_step + 0.1 * (mean_gap / tau - mean_step)


def delay_compensated(g: Number, now: Number, read: Number) -> Number:
    """DC-ASGD (Zheng 2017, equation 10), with lambda = 0.04."""
    strength = 0.04
    return g + strength * g * g * (now - read)


class Staleness(State):
    """Counts the staleness of updates, and tempers stale gradients, as one observer sees them.

    The staleness tau of an update is the number of updates applied to the parameters between the read that its
    gradient was computed at and its own application. The observer is who applies updates: a server, for those of all
    its workers, or in shared memory each worker, for its own alone, as counters that all of them write would slow
    them down. `tail` and `gap` go by what their observer has seen.
    """

    histogram: Counter[int]
    mean_step: float

    def __init__(self, handling: Handling, workers: int, histogram: Counter[int] | None = None) -> None:
        super().__init__(histogram=Counter() if histogram is None else histogram, mean_step=0.0)
        self._handling, self._workers = handling, workers

    def needs_the_read(self) -> bool:
        """Whether `temper` must know the parameters that were read."""
        return needs_the_read(self._handling)

    def temper(self, g: Tensor, tau: int, now: Tensor, read: Tensor | None) -> Tensor:
        """Count an update; the gradient to apply in place of `g`."""
        tempered = self.attempt(g, tau, now, read)
        self.histogram[tau] += 1
        return tempered

    def attempt(self, g: Tensor, tau: int, now: Tensor, read: Tensor | None) -> Tensor:
        """The gradient to apply in place of `g`, in an update that may still fail and is not counted."""
        match self._handling:
            case "inverse":
                return inverse(g, tau)
            case "max1":
                return max1(g, tau)
            case "exponential":
                return exponential(g, tau, self._workers)
            case "tail":
                return tail(g, self._share_below(tau))
            case "gap":
                assert read is not None
                gap = (now - read).abs_()
                if tau:
                    self.mean_step = mean_step_after(self.mean_step, float(gap.mean()), tau)
                return gap_aware(g, gap, max(self.mean_step, SMALLEST_STEP))
            case "delay-compensated":
                assert read is not None
                return delay_compensated(g, now, read)
        return g

    def _share_below(self, tau: int) -> float:
        """The share of updates less stale than this one, which itself is one of them, with half of the ties."""
        below = sum(n for t, n in self.histogram.items() if t < tau) + (self.histogram[tau] + 1) / 2
        return below / (self.histogram.total() + 1)
