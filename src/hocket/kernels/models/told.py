"""HOGWILD! of a linear model by rows: workers pass on what each row adds, and each adds it to a copy of its own.

An update of a batch is its rows, each times a slope: 64 bytes say it for 16 rows, where the columns of these are a
quarter of all lines of the vector, each of which would wander from core to core. As in HOGWILD! nobody locks and nobody
waits, and a gradient lacks what others are computing meanwhile; but no update is lost.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.kernels.arrays import Floats, Integers
from hocket.kernels.jit import kernel
from hocket.kernels.memory.atomics import fetch_add, load, store
from hocket.kernels.memory.gather import CompiledVector, Near
from hocket.kernels.memory.updates import begin_together, copy_vector, count_told, count_versions
from hocket.kernels.memory.words import FIRST, LEFT, LINE, NEXT, STRETCH, WORKERS
from hocket.kernels.models.family import DIVERGED, DONE, Log, note, portion, stop_all, take_batch
from hocket.kernels.models.scoring import SparseData, descend_rows, score_rows


class Told(NamedTuple):
    """What the workers of a stretch tell each other of its batches, and what one of them makes of it."""

    slopes: Floats
    """Of all rows, by their place in the order."""
    done: Integers
    """A line a batch: the last stretch in which its slopes were complete."""
    x: Floats
    """The worker's own copy of the parameters: with all its own updates, and those of others that it has heard."""
    missing: Integers
    """Batches that others had not done when the worker came by: one of each of them, at most."""


@kernel
def rate_of(shared: CompiledVector, n: int, batch: int, lr: float) -> np.float32:
    """What one of a batch's n rows counts, untempered."""
    return np.float32(lr * portion(shared, n, batch) / n)


@kernel
def hear(
    shared: CompiledVector,
    told: Told,
    data: SparseData,
    order: Integers,
    batch: int,
    lr: float,
    chosen: Integers,
    missing: int,
    heard: int,
    until: int,
) -> int:
    """Add what others did in the first `missing` batches of that list and in those from `heard` to before `until`.

    Returns how many are missing now.
    """
    still = 0
    for k in range(missing + until - heard):
        number = told.missing[k] if k < missing else heard + k - missing
        if load(told.done, number * LINE) != shared.control[STRETCH]:
            told.missing[still] = number
            still += 1
            continue
        begin, end = number * batch, min(number * batch + batch, order.size)
        rate = rate_of(shared, end - begin, batch, lr)
        descend_rows(told.x, data, order, begin, end, told.slopes[begin:end], chosen, rate, True)
    return still


@kernel
def loop_by_rows(
    shared: CompiledVector,
    near: Near,
    told: Told,
    data: SparseData,
    chosen: Integers,
    order: Integers,
    batch: int,
    lr: float,
    log: Log,
) -> tuple[int, int]:
    """A worker's part of an epoch, as `sparse_loop`, but with few lines that others write.

    Each batch's slopes say all that it changes: a line for 16 rows, where their columns are a quarter of all lines.
    Nobody waits: who is late with a batch is heard later.
    """
    control, rows, worker = shared
    dim, x = data.decay.size + 1, told.x
    skip = (control[WORKERS] - 1) * batch
    begin_together(control)
    copy_vector(rows[0], x, dim)  # nobody writes there before all have ended
    heard = control[FIRST]
    made = missing = applied = 0
    status = DONE
    while True:
        begin = take_batch(shared, near, dim, made, batch, order.size, lr)
        if begin < 0:
            status = ~begin
            break
        end = min(begin + batch, order.size)
        n = end - begin
        missing = hear(shared, told, data, order, batch, lr, chosen, missing, heard, begin // batch)
        heard = begin // batch + 1
        slopes = told.slopes[begin:end]
        loss = score_rows(x, data, order, begin, end, skip, slopes)
        if not np.isfinite(loss):
            stop_all(control)
            note(log, made, loss, n)
            made, status = made + 1, DIVERGED
            break
        store(told.done, (heard - 1) * LINE, control[STRETCH])
        count_told(control, worker, missing)
        descend_rows(x, data, order, begin, end, slopes, chosen, rate_of(shared, n, batch, lr))
        note(log, made, loss, n)
        made += 1
        applied += 1
    count_versions(control, applied)
    if fetch_add(control, LEFT, 1) == control[WORKERS] - 1:  # the last one: all batches are done
        until = min(load(control, NEXT), -(-order.size // batch))
        hear(shared, told, data, order, batch, lr, chosen, missing, heard, until)
        copy_vector(x, rows[0], dim)
    return made, status
