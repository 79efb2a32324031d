"""The rules of `hocket.core.staleness`, compiled; what they must remember is in the words of the worker that asks."""

from __future__ import annotations

import numpy as np
import torch
from numba import float32
from torch import Tensor

from hocket.core import staleness as rules
from hocket.kernels.arrays import Rows, Vector, Words
from hocket.kernels.jit import kernel
from hocket.kernels.memory.words import (
    EXPONENTIAL,
    GAP,
    GAP_MEAN,
    HANDLING,
    INVERSE,
    LARGEST_LR,
    MAX1,
    MEAN_SQUARE,
    SEEN,
    SLOTS,
    STALENESS,
    STALENESS_BINS,
    TAIL,
    UPDATES,
    WORKER_AREA,
    WORKER_WORDS,
    WORKERS,
)

_inverse, _max1 = kernel(rules.inverse), kernel(rules.max1)
_exponential, _tail = kernel(rules.exponential), kernel(rules.tail)
_newest_share, _nearer = kernel(rules.newest_share), kernel(rules.nearer)
# Loops over these are vectorised: their numbers are single, as the parameters are, and no division is checked.
gap_aware = kernel(rules.gap_aware, fastmath={"contract"}, locals={"gap": float32}, error_model="numpy")
usual_step_of = kernel(rules.usual_step, fastmath={"contract"})
delay_compensated = kernel(rules.delay_compensated, fastmath={"contract"}, locals={"strength": float32})


def by_gap(g: Tensor, now: Tensor, read: Tensor, step: float, out: Tensor) -> Tensor:
    """`staleness.by_gap` in one pass over memory, where there are five: the same bits, in `out`."""
    _temper(g.numpy(), now.numpy(), read.numpy(), np.float32(step), out.numpy())
    return out


@kernel(error_model="numpy")
def _temper(g: Vector, now: Vector, read: Vector, step: np.float32, tempered: Vector) -> None:
    for i in range(len(tempered)):
        tempered[i] = gap_aware(g[i], abs(now[i] - read[i]), step)


def looked_ahead(now: Tensor, before: Tensor, ahead: float) -> Tensor:
    """`staleness.looked_ahead` in one pass: the same bits."""
    view = torch.empty_like(now)
    _look_ahead(now.numpy(), before.numpy(), np.float32(1 + ahead) - np.float32(1), view.numpy())
    return view


@kernel(fastmath={"contract"})  # as PyTorch's lerp rounds
def _look_ahead(now: Vector, before: Vector, ahead: np.float32, view: Vector) -> None:
    for i in range(len(view)):
        x = now[i]
        view[i] = x + ahead * (x - before[i])
        before[i] = x


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
def squares_row(control: Words, w: int) -> int:
    """The row of each parameter's mean square of worker w's gradients, for GAP."""
    return control[SLOTS] + control[WORKERS] + w


@kernel
def observe(control: Words, rows: Rows, w: int, g: Vector, lr: float, dim: int) -> None:
    """Look at a gradient before it is tempered."""
    if control[HANDLING] == GAP:
        share = np.float32(_seen_one(control, w, lr))
        _square_each(rows[squares_row(control, w)], g, share, dim)
    elif control[HANDLING] == GAP_MEAN:
        observe_square(control, w, float(_mean_square(g, dim)), lr)


@kernel
def observe_square(control: Words, w: int, square: float, lr: float) -> None:
    """Look at a gradient of which only the mean square counts."""
    share = _seen_one(control, w, lr)
    own = control[WORKER_AREA + w * WORKER_WORDS :].view(np.float64)
    own[MEAN_SQUARE] = _nearer(own[MEAN_SQUARE], square, share)


@kernel
def usual_step(control: Words, w: int) -> np.float32:
    """How far one update of worker w usually moves any parameter."""
    own = control[WORKER_AREA + w * WORKER_WORDS :].view(np.float64)
    return np.float32(usual_step_of(own[MEAN_SQUARE], own[LARGEST_LR]))


@kernel
def largest_lr(control: Words, w: int) -> np.float32:
    return np.float32(control[WORKER_AREA + w * WORKER_WORDS :].view(np.float64)[LARGEST_LR])


@kernel
def _seen_one(control: Words, w: int, lr: float) -> float:
    """Count a gradient; what it counts in the running mean."""
    words = control[WORKER_AREA + w * WORKER_WORDS :]
    numbers = words.view(np.float64)
    numbers[LARGEST_LR] = max(numbers[LARGEST_LR], lr)
    words[SEEN] += 1
    return _newest_share(words[SEEN])


@kernel(fastmath={"contract"})
def _square_each(squares: Vector, g: Vector, share: np.float32, dim: int) -> None:
    for i in range(dim):
        squares[i] = _nearer(squares[i], g[i] * g[i], share)


@kernel(fastmath={"reassoc", "contract"})  # so that the sum can be vectorised
def _mean_square(g: Vector, dim: int) -> np.float32:
    total = np.float32(0.0)
    for i in range(dim):
        total += g[i] * g[i]
    return total / np.float32(dim)
