"""Workers that take several batches on a copy of their own before they write what these changed.

Where a batch is quick, most of the time goes into lines of the shared vector that wander from core to core; a copy
lets `every` batches pay for one such walk. It is a shared vector itself, of one worker and without locks, so that the
loops of all families work on it just as on the one that all share.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hocket.core.shared import Sharing
from hocket.kernels.compiled import kernel
from hocket.kernels.control import BROKEN, EVERY, GAP, HANDLING, HOGWILD, METHOD, NO_ROW
from hocket.kernels.shared import (
    close_read,
    close_write,
    open_read,
    open_write,
    private_row,
    publish,
    read_into,
    staleness,
    temper,
)
from hocket.kernels.vector import Block, SharedVector, nbytes

Words = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float32]]


class View(NamedTuple):
    """A shared vector as one of its workers sees it."""

    control: Words
    rows: Floats
    worker: int


class Copy:
    """A worker's own vector, and what it needs to compare it with the shared one."""

    def __init__(self, dim: int) -> None:
        sharing = Sharing("hogwild", dim, 1)
        vector = SharedVector.create(Block.anonymous(nbytes(sharing)), sharing)
        self.view = View(vector.control, vector.rows, 0)
        self.start, self.gained = np.zeros(dim, np.float32), np.zeros(dim, np.float32)


@kernel
def keep_up(shared: View, near: View, start: Floats, gained: Floats, dim: int, made: int, over: bool) -> bool:
    """To be called before each batch of an epoch, and when it is `over`: False where a lock could not be had.

    The first time it takes a copy. After each `every` batches of those `made`, and in the end, it adds what the copy
    gained to the shared vector and takes a new one. `start` is what the shared vector was when the copy was taken,
    `gained` is scratch. Where batches go to the shared vector itself there is nothing to do.
    """
    every = shared.control[EVERY]
    if every == 1:
        return True
    if made > 0:
        if made % every != 0 and not over:
            return True
        if shared.control[METHOD] == HOGWILD and shared.control[HANDLING] < GAP:
            _swap(shared, near.rows[0], start, dim)
            return True
        for i in range(dim):
            gained[i] = start[i] - near.rows[0, i]
        read_was_kept = shared.control[METHOD] < HOGWILD or shared.control[HANDLING] >= GAP
        read = private_row(shared.control, shared.worker) if read_was_kept else NO_ROW
        if publish(shared.control, shared.rows, shared.worker, read, gained, 1.0, dim) == BROKEN:
            return False
    if read_into(shared.control, shared.rows, shared.worker, start, dim) == NO_ROW:
        return False
    for i in range(dim):
        near.rows[0, i] = start[i]
    return True


@kernel(fastmath={"contract"})
def _swap(shared: View, copy: Floats, start: Floats, dim: int) -> None:
    """Give and take in one pass, where nobody locks and nobody else must see what was read."""
    control, worker = shared.control, shared.worker
    row = open_write(control, shared.rows, worker, dim)
    x = shared.rows[row]
    factor = np.float32(temper(control, worker, staleness(control, worker)))
    for i in range(dim):
        now = x[i] + factor * (copy[i] - start[i])
        x[i] = copy[i] = start[i] = now
    close_write(control, worker, row)
    close_read(control, worker, open_read(control, shared.rows, worker))  # for the version
