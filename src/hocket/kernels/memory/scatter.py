"""Sparse updates: only the coordinates that a gradient touches are read and written."""

from __future__ import annotations

import numpy as np

from hocket.kernels.jit import kernel
from hocket.kernels.memory.tempering import delay_compensated, factor, gap_aware, mean_step
from hocket.kernels.memory.updates import close_write, open_write, staleness
from hocket.kernels.memory.words import (
    BROKEN,
    GAP,
    HANDLING,
    NO_ROW,
    RETRY,
)
from hocket.kernels.models.family import Columns, Floats, Integers


@kernel
def scatter(
    control: Integers,
    rows: Floats,
    worker: int,
    dim: int,
    touched: Columns,
    seen: Floats,
    g: Floats,
    step: Floats,
    count: int,
    lr: float,
) -> int:
    """Descend by lr * g, tempered by its staleness: APPLIED, DROPPED or BROKEN.

    Element k of the first `count` belongs to coordinate touched[k], which was seen[k] when it was read. A coordinate
    may come up several times; its steps add up. `step` is scratch.
    """
    status = RETRY
    while status == RETRY:
        row = open_write(control, rows, worker, dim)
        if row == NO_ROW:
            return BROKEN
        x = rows[row]
        tau = staleness(control, worker)
        _temper_each(control, worker, tau, x, touched, seen, g, step, count)
        for k in range(count):
            x[touched[k]] -= np.float32(lr) * step[k]
        status = close_write(control, worker, row)
    return status


@kernel
def _temper_each(
    control: Integers,
    worker: int,
    tau: int,
    x: Floats,
    touched: Columns,
    seen: Floats,
    g: Floats,
    step: Floats,
    count: int,
) -> None:
    """step = tempered g: by one factor, by each coordinate's gap, or compensated for the delay."""
    if control[HANDLING] < GAP:
        share = np.float32(factor(control, worker, tau))
        for k in range(count):
            step[k] = share * g[k]
    elif control[HANDLING] == GAP:
        total = np.float32(0)
        for k in range(count):
            step[k] = abs(x[touched[k]] - seen[k])
            total += step[k]
        usual = mean_step(control, worker, total / np.float32(count), tau)
        for k in range(count):
            step[k] = gap_aware(g[k], step[k], usual)
    else:
        for k in range(count):
            step[k] = delay_compensated(g[k], x[touched[k]], seen[k])
