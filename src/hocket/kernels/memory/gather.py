"""Workers that take several batches on a copy of their own before they write what these changed.

Where a batch is quick, most of the time goes into lines of the shared vector that wander from core to core; a copy
lets `every` batches pay for one such walk. It is a shared vector itself, of one worker and without locks, so that the
loops of all families work on it just as on the one that all share.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from hocket.core.sharing import SMALLEST_LR, Sharing
from hocket.kernels.arrays import Floats, Integers
from hocket.kernels.jit import kernel
from hocket.kernels.memory.tempering import factor
from hocket.kernels.memory.updates import (
    close_write,
    copy_vector,
    open_write,
    private_row,
    publish,
    read_into,
    staleness,
)
from hocket.kernels.memory.vector import MappedVector
from hocket.kernels.memory.words import (
    BASE_HEAD,
    BROKEN,
    EVERY,
    GAP,
    HANDLING,
    HOGWILD,
    METHOD,
    NO_ROW,
    READ_VERSION,
    SLOT_BITS,
    WORKER_AREA,
    WORKER_WORDS,
)


class CompiledVector(NamedTuple):
    """A shared vector as the compiled code of one worker sees it."""

    control: Integers
    rows: Floats
    worker: int


class Near(NamedTuple):
    """The vector that a worker takes its batches on: a copy of its own, or the shared one itself."""

    vector: CompiledVector
    start: Floats
    """What the shared vector was when the copy was taken."""
    gained: Floats
    """Scratch."""

    @classmethod
    def copy(cls, dim: int) -> Near:
        """A copy of `dim` parameters."""
        own = MappedVector.create(Sharing("hogwild", dim, 1), torch.zeros(dim))
        start, gained = np.zeros((2, dim), np.float32)
        return cls(CompiledVector(own.control, own.rows, 0), start, gained)

    @classmethod
    def itself(cls, shared: CompiledVector) -> Near:
        """No copy."""
        return cls(shared, np.zeros(0, np.float32), np.zeros(0, np.float32))


@kernel
def keep_up(shared: CompiledVector, near: Near, dim: int, made: int, over: bool, lr: float) -> bool:
    """To be called before each batch of an epoch, and when it is `over`: False where a lock could not be had.

    The first time it takes a copy. After each `every` batches of those `made`, and in the end, it adds what the copy
    gained to the shared vector and takes a new one. Where batches go to the shared vector itself there is nothing to
    do.
    """
    every = shared.control[EVERY]
    if every == 1:
        return True
    x = near.vector.rows[0]
    if made > 0:
        if made % every != 0 and not over:
            return True
        if shared.control[METHOD] == HOGWILD and shared.control[HANDLING] < GAP:
            _swap(shared, x, near.start, dim)
            return True
        scale = lr if lr > SMALLEST_LR else 1.0  # compensation for delay looks at gradients, not at steps
        for i in range(dim):
            near.gained[i] = (near.start[i] - x[i]) / np.float32(scale)
        read = private_row(shared.control, shared.worker) if shared.control[HANDLING] >= GAP else NO_ROW
        if publish(shared.control, shared.rows, shared.worker, read, near.gained, scale, dim) == BROKEN:
            return False
    if over:
        return True
    if read_into(shared.control, shared.rows, shared.worker, near.start, dim) == NO_ROW:
        return False
    copy_vector(near.start, x, dim)
    return True


@kernel(fastmath={"contract"})
def _swap(shared: CompiledVector, copy: Floats, start: Floats, dim: int) -> None:
    """Give and take in one pass, where nobody locks and nobody else must see what was read."""
    control, worker = shared.control, shared.worker
    row = open_write(control, shared.rows, worker, dim)
    x = shared.rows[row]
    share = np.float32(factor(control, worker, staleness(control, worker)))
    for i in range(dim):
        now = x[i] + share * (copy[i] - start[i])
        x[i] = copy[i] = start[i] = now
    close_write(control, worker, row)
    # It has read all up to where it began to write, and its own update
    words = WORKER_AREA + worker * WORKER_WORDS
    control[words + READ_VERSION] = (control[words + BASE_HEAD] >> SLOT_BITS) + 1
