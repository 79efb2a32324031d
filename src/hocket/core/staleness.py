"""What to do with a gradient that was computed at parameters which have changed since."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

Handling = Literal["none", "inverse", "max1", "fleet", "tail", "gap", "delay-compensated"]


@dataclass
class Staleness:
    """Counts the staleness of every update, and tempers stale gradients.

    The staleness tau of an update is the number of updates applied to the parameters between the read that its
    gradient was computed at and its own application.
    """

    handling: Handling
    workers: int
    histogram: Counter[int] = field(default_factory=Counter)
    _mean_step: float = 0.0

    def needs_the_read(self) -> bool:
        """Whether `temper` must know the parameters that were read."""
        return self.handling in ("gap", "delay-compensated")

    def temper(self, g: Tensor, tau: int, now: Tensor, read: Tensor | None) -> Tensor:
        """The gradient to apply in place of `g`."""
        self.histogram[tau] += 1
        match self.handling:
            case "inverse":
                return g / (tau + 1)
            case "max1":  # Zhang 2016
                return g / max(1, tau)
            case "fleet":  # Damaskinos 2020: exp(-beta tau)
                theta = self.workers + 1
                return g * math.exp(-2 / theta * math.log(1 + theta / 2) * tau)
            case "tail":  # Bäckström 2022: 1 + A (1 - 2 F(tau)) with A = 1, F the distribution seen so far
                # Half of the ties count, so that the mean factor is 1, also where all updates are equally stale.
                below = sum(n for t, n in self.histogram.items() if t < tau) + self.histogram[tau] / 2
                return g * (2 - 2 * below / self.histogram.total())
            case "gap":  # Barkai 2020: divide by |now - read| / C + 1, elementwise; C is the mean step
                assert read is not None
                gap = (now - read).abs_()
                if tau:
                    self._mean_step += 0.1 * (float(gap.mean()) / tau - self._mean_step)
                return g / gap.div_(max(self._mean_step, 1e-12)).add_(1)
            case "delay-compensated":  # Zheng 2017, equation 10, with lambda = 0.04
                assert read is not None
                return g + 0.04 * g * g * (now - read)
        return g
