"""Sparse updates: only the coordinates that a gradient touches are read and written."""

from __future__ import annotations

import numpy as np

from hocket.kernels.compiled import kernel
from hocket.kernels.control import (
    BROKEN,
    GAP,
    HANDLING,
    MEAN_STEP,
    NO_ROW,
    RETRY,
    WORKER_AREA,
    WORKER_WORDS,
)
from hocket.kernels.family import Columns, Floats, Integers
from hocket.kernels.shared import close_write, open_write, staleness, temper


@kernel
def scatter(
    control: Integers,
    rows: Floats,
    worker: int,
    dim: int,
    touched: Columns,
    seen: Floats,
    g: Floats,
    count: int,
    lr: float,
) -> int:
    """Descend by lr * g, tempered by its staleness: APPLIED, DROPPED or BROKEN.

    Element k of the first `count` belongs to coordinate touched[k], which was seen[k] when it was read. A coordinate
    may come up several times; its steps add up.
    """
    status = RETRY
    while status == RETRY:
        row = open_write(control, rows, worker, dim)
        if row == NO_ROW:
            return BROKEN
        x = rows[row]
        tau = staleness(control, worker)
        step = g
        if control[HANDLING] >= GAP:
            step = _temper_each(control, worker, tau, x, touched, seen, g, count)
        factor = np.float32(lr * temper(control, worker, tau))
        for k in range(count):
            x[touched[k]] -= factor * step[k]
        status = close_write(control, worker, row)
    return status


@kernel
def _temper_each(
    control: Integers, worker: int, tau: int, x: Floats, touched: Columns, seen: Floats, g: Floats, count: int
) -> Floats:
    """g, tempered coordinate by coordinate: by the gap, or compensated for the delay (see `hocket.core.staleness`)."""
    step = np.empty(count, np.float32)
    if control[HANDLING] != GAP:
        for k in range(count):
            step[k] = g[k] + np.float32(0.04) * g[k] * g[k] * (x[touched[k]] - seen[k])
        return step
    mean_step = control[WORKER_AREA + worker * WORKER_WORDS + MEAN_STEP :].view(np.float64)
    if tau:
        total = 0.0
        for k in range(count):
            total += abs(x[touched[k]] - seen[k])
        mean_step[0] += 0.1 * (total / count / tau - mean_step[0])
    scale = np.float32(1 / max(mean_step[0], 1e-12))
    for k in range(count):
        step[k] = g[k] / (abs(x[touched[k]] - seen[k]) * scale + np.float32(1))
    return step
