"""Sparse updates: only the coordinates that a gradient touches are read and written."""

from __future__ import annotations

import numpy as np

from hocket.kernels.jit import kernel
from hocket.kernels.memory.updates import close_write, open_write, staleness, temper
from hocket.kernels.memory.words import (
    BROKEN,
    GAP,
    HANDLING,
    MEAN_STEP,
    NO_ROW,
    RETRY,
    WORKER_AREA,
    WORKER_WORDS,
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
    """step = tempered g: by one factor, by each coordinate's gap, or compensated for the delay.

    See `hocket.core.staleness`.
    """
    if control[HANDLING] < GAP:
        factor = np.float32(temper(control, worker, tau))
        for k in range(count):
            step[k] = factor * g[k]
        return
    if control[HANDLING] != GAP:
        for k in range(count):
            step[k] = g[k] + np.float32(0.04) * g[k] * g[k] * (x[touched[k]] - seen[k])
        return
    mean_step = control[WORKER_AREA + worker * WORKER_WORDS + MEAN_STEP :].view(np.float64)
    if tau:
        total = 0.0
        for k in range(count):
            total += abs(x[touched[k]] - seen[k])
        mean_step[0] += 0.1 * (total / count / tau - mean_step[0])
    scale = np.float32(1 / max(mean_step[0], 1e-12))
    for k in range(count):
        step[k] = g[k] / (abs(x[touched[k]] - seen[k]) * scale + np.float32(1))
