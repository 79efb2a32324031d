"""The rules of `hocket.core.staleness`, compiled; what they must remember is in the words of the worker that asks."""

from __future__ import annotations

import numpy as np
from numba import float32
from numpy.typing import NDArray

from hocket.core import staleness as rules
from hocket.core.staleness import SMALLEST_STEP
from hocket.kernels.jit import kernel
from hocket.kernels.memory.words import (
    EXPONENTIAL,
    HANDLING,
    INVERSE,
    MAX1,
    MEAN_STEP,
    STALENESS,
    STALENESS_BINS,
    TAIL,
    UPDATES,
    WORKER_AREA,
    WORKER_WORDS,
    WORKERS,
)

Words = NDArray[np.int64]

_inverse, _max1 = kernel(rules.inverse), kernel(rules.max1)
_exponential, _tail = kernel(rules.exponential), kernel(rules.tail)
_mean_step_after = kernel(rules.mean_step_after)
# Loops over these are vectorised: their numbers are single, as the parameters are, and no division is checked.
gap_aware = kernel(rules.gap_aware, fastmath={"contract"}, locals={"steps": float32}, error_model="numpy")
delay_compensated = kernel(rules.delay_compensated, fastmath={"contract"}, locals={"strength": float32})


@kernel
def factor(control: Words, w: int, tau: int) -> float:
    """What a gradient of staleness tau is multiplied by, where the handling is a factor: those below GAP."""
    handling = control[HANDLING]
    if handling == INVERSE:
        return _inverse(1.0, tau)
    if handling == MAX1:
        return _max1(1.0, tau)
    if handling == EXPONENTIAL:
        return _exponential(1.0, tau, control[WORKERS])
    if handling == TAIL:
        return _tail(1.0, _share_below(control, w, tau))
    return 1.0


@kernel
def _share_below(control: Words, w: int, tau: int) -> float:
    """The share of worker w's updates less stale than this one, which itself is one of them, with half of the ties."""
    words = WORKER_AREA + w * WORKER_WORDS
    last = min(tau, STALENESS_BINS - 1)
    below = (control[words + STALENESS + last] + 1) / 2.0
    for t in range(last):
        below += control[words + STALENESS + t]
    return below / (control[words + UPDATES] + 1.0)


@kernel
def mean_step(control: Words, w: int, mean_gap: float, tau: int) -> np.float32:
    """How far one update moves a parameter, as worker w sees it, with a gap that tau updates made."""
    seen = control[WORKER_AREA + w * WORKER_WORDS + MEAN_STEP :].view(np.float64)
    if tau:
        seen[0] = _mean_step_after(seen[0], mean_gap, tau)
    return np.float32(max(seen[0], SMALLEST_STEP))
