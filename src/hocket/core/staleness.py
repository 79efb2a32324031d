"""What to do with a gradient that was computed at parameters which have changed since.

Each rule is one function that gives the gradient to apply in place of `g`. It takes numbers as well as tensors, and
the loops of `hocket.kernels` compile these very functions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from hocket.core.state import State

Handling = Literal["none", "inverse", "max1", "exponential", "tail", "gap", "gap-mean", "delay-compensated"]
Number = TypeVar("Number", float, Tensor)

SMALLEST_STEP = 1e-12
"""The usual step is taken to be this long at least: a parameter that has no gradient has none."""
REMEMBERED = 1000
"""Gradients over which the mean of their squares runs, once there are so many."""


def needs_the_read(handling: Handling) -> bool:
    """Whether a rule must know the parameters that were read."""
    return handling in ("gap", "gap-mean", "delay-compensated")


def needs_the_squares(handling: Handling) -> bool:
    """Whether a rule must know each parameter's mean squared gradient."""
    return handling == "gap"


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


def gap_aware(g: Number, gap: Number, step: Number) -> Number:
    """Gap-aware SGD (Barkai 2020): g / (gap / C + 1), where gap is |now - read| and C the usual step."""
    gap /= step  # in place where it is a tensor, which is the caller's no more
    gap += 1
    return g / gap


def usual_step(mean_square: Number, lr: float) -> Number:
    """Gap-aware SGD's C, how far one update usually moves a parameter: the largest rate times the RMS of gradients."""
    rms: Number = mean_square**0.5
    return lr * rms + SMALLEST_STEP


def newest_share(seen: int) -> float:
    """What the newest of so many gradients counts in their running mean, which so is unbiased from the first on."""
    return max(1 / seen, 1 / REMEMBERED)


def nearer(mean: Number, value: Number, share: float) -> Number:
    """A running mean with one value more."""
    return mean + share * (value - mean)


def delay_compensated(g: Number, now: Number, read: Number) -> Number:
    """DC-ASGD (Zheng 2017, equation 10), with lambda = 0.04."""
    strength = 0.04
    return g + strength * g * g * (now - read)


def by_gap(g: Tensor, now: Tensor, read: Tensor, step: Any) -> Tensor:
    """`gap_aware` of vectors; the step is each parameter's, or one number."""
    tempered: Tensor = gap_aware(g, (now - read).abs_(), step)
    return tempered


ByGap = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def looked_ahead(now: Tensor, before: Tensor, ahead: float) -> Tensor:
    """Where parameters will be once they have moved on by `ahead` of their way since `before`, which becomes `now`."""
    view = before.lerp(now, 1 + ahead)
    before.copy_(now)
    return view


LookedAhead = Callable[[Tensor, Tensor, float], Tensor]


class Staleness(State):
    """Counts the staleness of updates, and tempers stale gradients, as one observer sees them.

    The staleness tau of an update is the number of updates applied to the parameters between the read that its
    gradient was computed at and its own application. The observer is who applies updates: a server, for those of all
    its workers, or in shared memory each worker, for its own alone, as counters that all of them write would slow
    them down. `tail`, `gap` and `gap-mean` go by what their observer has seen.
    """

    histogram: Counter[int]
    seen: int
    """Gradients."""
    mean_square: Any
    """Of gradients: a tensor with each parameter's, or one number for all. Replaced, never changed in place."""
    largest_lr: float

    def __init__(
        self,
        handling: Handling,
        workers: int,
        x: Tensor,
        histogram: Counter[int] | None = None,
        by_gap: ByGap = by_gap,
    ) -> None:
        super().__init__(
            histogram=Counter() if histogram is None else histogram,
            seen=0,
            mean_square=torch.zeros_like(x) if needs_the_squares(handling) else 0.0,
            largest_lr=0.0,
        )
        self._handling, self._workers, self._by_gap = handling, workers, by_gap

    def needs_the_read(self) -> bool:
        """Whether `temper` must know the parameters that were read."""
        return needs_the_read(self._handling)

    def temper(self, g: Tensor, lr: float, tau: int, now: Tensor, read: Tensor | None) -> Tensor:
        """Count an update; the gradient to apply in place of `g`, at the rate `lr`."""
        self.observe(g, lr)
        tempered = self.attempt(g, tau, now, read)
        self.histogram[tau] += 1
        return tempered

    def observe(self, g: Tensor, lr: float) -> None:
        """Look at a gradient before it is tempered."""
        if self._handling in ("gap", "gap-mean"):
            self.seen += 1
            self.largest_lr = max(self.largest_lr, lr)
            square = g * g if self._handling == "gap" else float(torch.dot(g, g)) / g.numel()
            self.mean_square = nearer(self.mean_square, square, newest_share(self.seen))

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
                return by_gap(g, now, read, usual_step(self.mean_square, self.largest_lr))
            case "gap-mean":
                assert read is not None
                return self._by_gap(g, now, read, usual_step(self.mean_square, self.largest_lr))
            case "delay-compensated":
                assert read is not None
                return delay_compensated(g, now, read)
        return g

    def _share_below(self, tau: int) -> float:
        """The share of updates less stale than this one, which itself is one of them, with half of the ties."""
        below = sum(n for t, n in self.histogram.items() if t < tau) + (self.histogram[tau] + 1) / 2
        return below / (self.histogram.total() + 1)
