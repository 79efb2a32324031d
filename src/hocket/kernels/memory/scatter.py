"""Sparse updates: only the coordinates that a gradient touches are read and written."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.kernels.arrays import Columns, Floats, Integers
from hocket.kernels.jit import kernel
from hocket.kernels.memory.gather import CompiledVector
from hocket.kernels.memory.tempering import delay_compensated, factor, gap_aware, observe_square, usual_step
from hocket.kernels.memory.updates import close_write, open_write, staleness
from hocket.kernels.memory.words import BROKEN, DELAY_COMPENSATED, GAP, HANDLING, NO_ROW, RETRY


class Touched(NamedTuple):
    """A sparse gradient: element k is g[k] at coordinate at[k], which was seen[k] when it was read.

    A coordinate may come up several times; its steps add up.
    """

    at: Columns
    seen: Floats
    g: Floats
    step: Floats
    """Scratch."""

    @classmethod
    def empty(cls, capacity: int) -> Touched:
        seen, g, step = np.zeros((3, capacity), np.float32)
        return cls(np.zeros(capacity, np.int32), seen, g, step)


@kernel
def scatter(vector: CompiledVector, dim: int, touched: Touched, count: int, lr: float) -> int:
    """Descend by lr times the first `count` elements, tempered by their staleness: APPLIED, DROPPED or BROKEN."""
    control, rows, worker = vector
    if GAP <= control[HANDLING] < DELAY_COMPENSATED:
        # For GAP too: the mean of each coordinate would be a pass over all of them
        observe_square(control, worker, float(_mean_square(touched.g, count)), lr)
    status = RETRY
    while status == RETRY:
        row = open_write(control, rows, worker, dim)
        if row == NO_ROW:
            return BROKEN
        x = rows[row]
        _temper_each(control, worker, staleness(control, worker), x, touched, count)
        for k in range(count):
            x[touched.at[k]] -= np.float32(lr) * touched.step[k]
        status = close_write(control, worker, row)
    return status


@kernel
def _temper_each(control: Integers, worker: int, tau: int, x: Floats, touched: Touched, count: int) -> None:
    """step = tempered g: by one factor, by each coordinate's gap, or compensated for the delay."""
    at, seen, g, step = touched
    if control[HANDLING] < GAP:
        share = np.float32(factor(control, worker, tau))
        for k in range(count):
            step[k] = share * g[k]
    elif control[HANDLING] < DELAY_COMPENSATED:
        usual = usual_step(control, worker)
        for k in range(count):
            step[k] = gap_aware(g[k], abs(x[at[k]] - seen[k]), usual)
    else:
        for k in range(count):
            step[k] = delay_compensated(g[k], x[at[k]], seen[k])


@kernel
def _mean_square(g: Floats, count: int) -> np.float32:
    total = np.float32(0)
    for k in range(count):
        total += g[k] * g[k]
    return total / np.float32(count)
