"""One parameter vector that many workers read and write: mutex, read-write lock, HOGWILD! and Leashed-SGD.

`control` (int64) holds the words that `hocket.kernels.memory.words` names; `rows` (float32) holds the parameters:
- mutex, rwlock: row 0 is the shared vector, row 1 + w the copy that worker w computes its gradient at;
- hogwild (Niu et al. 2011): row 0, read and written by all at once;
- leashed: the slots of `hocket.kernels.memory.leashed`.
Hogwild and leashed too have a copy for each worker, behind the others, where the handling of staleness must know the
parameters that were read. Behind these, where it must, is each worker's row of mean squared gradients.

A dense update is `acquire`, a gradient at that row, `publish`. A sparse one is `open_read`, a few elements,
`close_read`, then `open_write`, a few elements, `close_write`, and again from `open_write` on RETRY. Where these give
NO_ROW, a lock could not be had before its deadline and the update ends as BROKEN.
"""

from __future__ import annotations

import numpy as np

from hocket.kernels.arrays import Rows, Vector, Words
from hocket.kernels.jit import kernel
from hocket.kernels.memory.atomics import fetch_add, load, monotonic_ns, sched_yield
from hocket.kernels.memory.leashed import advance, claim, count_in, count_out
from hocket.kernels.memory.locks import READING, WRITING, back_off, drop, take
from hocket.kernels.memory.tempering import (
    delay_compensated,
    factor,
    gap_aware,
    largest_lr,
    observe,
    squares_row,
    usual_step,
    usual_step_of,
)
from hocket.kernels.memory.words import (
    APPLIED,
    ARRIVED,
    BASE_HEAD,
    BROKEN,
    CANARY,
    DROPPED,
    DROPS,
    FAILED,
    FAILED_NS,
    GAP,
    GAP_MEAN,
    HANDLING,
    HEAD,
    HOGWILD,
    LEASHED,
    METHOD,
    NEXT,
    NO_ROW,
    PERSISTENCE,
    READ_VERSION,
    RETRY,
    SLOT_BITS,
    SLOT_MASK,
    SLOTS,
    STALENESS,
    STALENESS_BINS,
    STOP,
    TRIES,
    TRIES_BINS,
    UPDATES,
    WAIT_NS,
    WORKER_AREA,
    WORKER_WORDS,
    WORKERS,
)

_ONE_VERSION = 1 << SLOT_BITS
PATIENCE_NS = 10_000_000


@kernel
def next_batch(control: Words) -> int:
    """The number of a batch that no other worker gets."""
    return fetch_add(control, NEXT, 1)


@kernel
def begin_together(control: Words) -> None:
    """Wait until all workers are here, or for a hundredth of a second: who is late then begins late."""
    workers = control[WORKERS]
    arrived = fetch_add(control, ARRIVED, 1) + 1
    all_here = (arrived + workers - 1) // workers * workers
    until = monotonic_ns() + PATIENCE_NS
    while load(control, ARRIVED) < all_here and monotonic_ns() < until:
        sched_yield()


@kernel
def stopped(control: Words) -> bool:
    """Whether workers shall end: someone asked for it, or waited for a lock in vain."""
    return load(control, STOP) != 0


@kernel
def version(control: Words) -> int:
    """Updates applied so far."""
    return load(control, HEAD) >> SLOT_BITS


@kernel
def private_row(control: Words, w: int) -> int:
    """The row of worker w's own copy."""
    return control[SLOTS] + w


@kernel
def open_read(control: Words, w: int) -> int:
    """The row of the current parameters, to read until `close_read`, or NO_ROW."""
    method = control[METHOD]
    if method == LEASHED:
        head = count_in(control)
    elif method == HOGWILD or take(control, w, READING):
        head = load(control, HEAD)
    else:
        return NO_ROW
    control[WORKER_AREA + w * WORKER_WORDS + READ_VERSION] = head >> SLOT_BITS
    return head & SLOT_MASK


@kernel
def close_read(control: Words, w: int, row: int) -> None:
    """End a read. It must end before the worker opens a write."""
    method = control[METHOD]
    if method == LEASHED:
        count_out(control, row)
    elif method != HOGWILD:
        drop(control)


@kernel
def acquire(control: Words, rows: Rows, w: int, dim: int) -> int:
    """The row to compute a dense gradient at, which stays as it is (but for hogwild) until `publish`, or NO_ROW."""
    row = open_read(control, w)
    in_place = control[METHOD] >= HOGWILD and control[HANDLING] < GAP
    if in_place or row == NO_ROW:
        return row
    own = private_row(control, w)
    copy_vector(rows[row], rows[own], dim)
    close_read(control, w, row)
    return own


@kernel
def release(control: Words, w: int, row: int) -> None:
    """Give back a row of `acquire` when no update follows; `publish` does this itself."""
    if control[METHOD] == LEASHED and 0 <= row < control[SLOTS]:
        count_out(control, row)


@kernel
def open_write(control: Words, rows: Rows, w: int, dim: int) -> int:
    """A row with the current parameters to change in place, or NO_ROW. `close_write` must follow."""
    row = _claim_row(control, w)
    if row != NO_ROW and control[METHOD] == LEASHED:
        copy_vector(rows[_base_row(control, w)], rows[row], dim)
        count_out(control, _base_row(control, w))
    return row


@kernel
def close_write(control: Words, w: int, row: int) -> int:
    """Make the change seen: APPLIED, or, where another worker came first, RETRY or DROPPED."""
    words = WORKER_AREA + w * WORKER_WORDS
    method = control[METHOD]
    if method == LEASHED:
        head = control[words + BASE_HEAD]
        if not advance(control, head, row):
            return _fail(control, w)
        _end_tries(control, w)
    elif method == HOGWILD:
        control[CANARY] += 1  # in its turn behind the parameters, and no more atomic than they are
        head = fetch_add(control, HEAD, _ONE_VERSION)
    else:
        head = control[HEAD]
        control[HEAD] = head + _ONE_VERSION
        drop(control)
    tau = (head >> SLOT_BITS) - control[words + READ_VERSION]
    control[words + STALENESS + min(tau, STALENESS_BINS - 1)] += 1
    control[words + UPDATES] += 1
    return APPLIED


@kernel
def count_told(control: Words, w: int, unheard: int) -> None:
    """Count an update of worker w that lacks so many of those before it, and that none can write over."""
    words = WORKER_AREA + w * WORKER_WORDS
    control[words + STALENESS + min(unheard, STALENESS_BINS - 1)] += 1
    control[words + UPDATES] += 1


@kernel
def count_versions(control: Words, updates: int) -> None:
    """Count what `count_told` counted before: once for many, as all workers write it."""
    fetch_add(control, CANARY, updates)
    fetch_add(control, HEAD, updates << SLOT_BITS)


@kernel
def staleness(control: Words, w: int) -> int:
    """Updates applied since worker w's read, as its open write sees them."""
    words = WORKER_AREA + w * WORKER_WORDS
    return (control[words + BASE_HEAD] >> SLOT_BITS) - control[words + READ_VERSION]


@kernel
def publish(control: Words, rows: Rows, w: int, read_row: int, g: Vector, lr: float, dim: int) -> int:
    """Descend by lr * g, tempered by its staleness: APPLIED, DROPPED or BROKEN.

    `read_row` is what `acquire` gave; it is given back here. NO_ROW says that it was given back already, which is fine
    where the handling need not know what was read.
    """
    in_place = control[METHOD] != LEASHED
    read = rows[read_row]
    release(control, w, read_row)
    observe(control, rows, w, g, lr, dim)
    status = RETRY
    while status == RETRY:
        row = _claim_row(control, w)
        if row == NO_ROW:
            return BROKEN
        tau = staleness(control, w)
        x = rows[row]
        if in_place or control[HANDLING] >= GAP:
            if not in_place:
                copy_vector(rows[_base_row(control, w)], x, dim)
            _descend(control, rows, w, x, read, g, lr, tau, dim)
        else:  # copy and descend in one pass
            _step(rows[_base_row(control, w)], x, g, np.float32(lr * factor(control, w, tau)), dim)
        if not in_place:
            count_out(control, _base_row(control, w))
        status = close_write(control, w, row)
    return status


@kernel
def read_into(control: Words, rows: Rows, w: int, out: Vector, dim: int) -> int:
    """Copy the parameters, for a gradient that is computed elsewhere; returns their version, or NO_ROW."""
    row = acquire(control, rows, w, dim)
    if row == NO_ROW:
        return NO_ROW
    copy_vector(rows[row], out, dim)
    release(control, w, row)
    return control[WORKER_AREA + w * WORKER_WORDS + READ_VERSION]


@kernel
def _claim_row(control: Words, w: int) -> int:
    """The row that an update of worker w may write, or NO_ROW. In leashed the base row is then held for reading."""
    method = control[METHOD]
    row = 0
    if method == LEASHED:
        row = claim(control, w)  # before the base is chosen, as that should be as fresh as can be
        if row == NO_ROW:
            return NO_ROW
        head = count_in(control)
    elif method == HOGWILD or take(control, w, WRITING):
        head = load(control, HEAD)
    else:
        return NO_ROW
    control[WORKER_AREA + w * WORKER_WORDS + BASE_HEAD] = head
    return row


@kernel
def _base_row(control: Words, w: int) -> int:
    """The row that worker w's open write builds on."""
    return control[WORKER_AREA + w * WORKER_WORDS + BASE_HEAD] & SLOT_MASK


@kernel
def _fail(control: Words, w: int) -> int:
    """Another worker published first: try again, or drop the update after more than `persistence` failures."""
    words = WORKER_AREA + w * WORKER_WORDS
    control[words + FAILED] += 1
    failed = control[words + FAILED]
    if failed == 1:
        control[words + FAILED_NS] = monotonic_ns()
    if control[PERSISTENCE] >= 0 and failed > control[PERSISTENCE]:
        _end_tries(control, w)
        control[words + DROPS] += 1
        return DROPPED
    back_off(control, w, failed)
    return RETRY


@kernel
def _end_tries(control: Words, w: int) -> None:
    """Count the failed tries of an update that is over, and the time since the first of them."""
    words = WORKER_AREA + w * WORKER_WORDS
    if control[words + FAILED]:
        control[words + WAIT_NS] += monotonic_ns() - control[words + FAILED_NS]
    control[words + TRIES + min(control[words + FAILED], TRIES_BINS - 1)] += 1
    control[words + FAILED] = 0


@kernel
def _descend(
    control: Words, rows: Rows, w: int, x: Vector, read: Vector, g: Vector, lr: float, tau: int, dim: int
) -> None:
    """x -= lr * tempered g, in place."""
    handling = control[HANDLING]
    if handling < GAP:
        _step(x, x, g, np.float32(lr * factor(control, w, tau)), dim)
    elif handling == GAP:
        _step_by_own_gap(x, read, g, np.float32(lr), rows[squares_row(control, w)], largest_lr(control, w), dim)
    elif handling == GAP_MEAN:
        _step_by_gap(x, read, g, np.float32(lr), usual_step(control, w), dim)
    else:
        _step_compensated(x, read, g, np.float32(lr), dim)


@kernel
def copy_vector(source: Vector, target: Vector, dim: int) -> None:
    for i in range(dim):
        target[i] = source[i]


@kernel(fastmath={"contract"})
def _step(source: Vector, target: Vector, g: Vector, rate: np.float32, dim: int) -> None:
    """target = source - rate * g."""
    if source.ctypes.data == target.ctypes.data:  # the compiler vectorises each loop, but not one for both
        for i in range(dim):
            target[i] -= rate * g[i]
    else:
        for i in range(dim):
            target[i] = source[i] - rate * g[i]


@kernel(fastmath={"contract"})
def _step_by_gap(x: Vector, read: Vector, g: Vector, lr: np.float32, usual: np.float32, dim: int) -> None:
    for i in range(dim):
        x[i] -= lr * gap_aware(g[i], abs(x[i] - read[i]), usual)


@kernel(fastmath={"contract"})
def _step_by_own_gap(
    x: Vector, read: Vector, g: Vector, lr: np.float32, squares: Vector, largest: np.float32, dim: int
) -> None:
    for i in range(dim):
        x[i] -= lr * gap_aware(g[i], abs(x[i] - read[i]), np.float32(usual_step_of(squares[i], largest)))


@kernel(fastmath={"contract"})
def _step_compensated(x: Vector, read: Vector, g: Vector, lr: np.float32, dim: int) -> None:
    for i in range(dim):
        x[i] -= lr * delay_compensated(g[i], x[i], read[i])
