"""Linear models on sparse rows, compiled: logistic regression and the linear support vector machine.

`hocket.kernels.models.scoring` tells what they compute, and `told` how workers share it by rows.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import numba
import numpy as np

from hocket.kernels.arrays import Columns, Floats, Integers
from hocket.kernels.jit import kernel
from hocket.kernels.memory.gather import CompiledVector, Near
from hocket.kernels.memory.scatter import Touched, scatter
from hocket.kernels.memory.tempering import factor
from hocket.kernels.memory.updates import (
    begin_together,
    close_read,
    close_write,
    open_read,
    open_write,
    staleness,
)
from hocket.kernels.memory.vector import MappedVector
from hocket.kernels.memory.words import BROKEN, GAP, HANDLING, LINE, NO_ROW, RETRY, STRETCH, WORKERS
from hocket.kernels.models.family import (
    BROKEN_LOCK,
    DIVERGED,
    Kernel,
    KernelWorker,
    Log,
    note,
    portion,
    spread_out,
    stop_all,
    take_batch,
)
from hocket.kernels.models.packed import element, pack, score
from hocket.kernels.models.scoring import SparseData, descend_rows, loss_and_slope, score_rows
from hocket.kernels.models.told import Told, loop_by_rows


class SparseWork(NamedTuple):
    """One worker's workspace for a batch."""

    slopes: Floats
    chosen: Integers
    """Scratch."""
    touched: Touched


@kernel
def linear_gradient(x: Floats, data: SparseData, chosen: Integers, touched: Touched) -> tuple[float, int]:
    """The mean loss of the chosen rows at x, and how many elements of `touched` it filled."""
    firsts, lengths, groups, targets, decay, hinge = data
    coordinates, seen, g, _ = touched
    share = np.float32(1 / chosen.size)
    bias = decay.size
    loss = 0.0
    bias_slope = np.float32(0)
    at = 0
    for row in chosen:
        product = score(x, groups, firsts[row], firsts[row + 1], firsts[row + 1])
        row_loss, slope = loss_and_slope(hinge, x[bias] + product, targets[row])
        loss += row_loss
        bias_slope += share * slope
        for k in range(lengths[row]):
            column, value = element(groups, firsts[row], k)
            coordinates[at], seen[at] = column, x[column]
            g[at] = share * (slope * value + decay[column] * seen[at])
            at += 1
    coordinates[at], seen[at], g[at] = bias, x[bias], bias_slope
    return loss / chosen.size, at + 1


@kernel
def sparse_loop(
    shared: CompiledVector,
    near: Near,
    data: SparseData,
    work: SparseWork,
    order: Integers,
    batch: int,
    lr: float,
    log: Log,
) -> tuple[int, int]:
    """A worker's part of an epoch: batches taken, and how it ended.

    Handlings of staleness that look at each coordinate get the gradient as a list of touched coordinates.
    """
    dim = data.decay.size + 1
    control, rows, worker = near.vector
    listed = control[HANDLING] >= GAP
    skip = (shared.control[WORKERS] - 1) * batch
    count = made = 0
    begin_together(shared.control)
    while True:
        begin = take_batch(shared, near, dim, made, batch, order.size, lr)
        if begin < 0:
            return made, ~begin
        end = min(begin + batch, order.size)
        n = end - begin
        read = open_read(control, worker)
        if read == NO_ROW:
            return made, BROKEN_LOCK
        if listed:
            loss, count = linear_gradient(rows[read], data, order[begin:end], work.touched)
        else:
            loss = score_rows(rows[read], data, order, begin, end, skip, work.slopes)
        close_read(control, worker, read)
        if not np.isfinite(loss):
            stop_all(shared.control)
            note(log, made, loss, n)
            return made + 1, DIVERGED
        status = RETRY
        share = portion(shared, n, batch)
        if listed:
            status = scatter(near.vector, dim, work.touched, count, lr * share)
        while status == RETRY:
            to = open_write(control, rows, worker, dim)
            if to == NO_ROW:
                return made, BROKEN_LOCK
            rate = np.float32(lr * share / n * factor(control, worker, staleness(control, worker)))
            # Not `work` as a whole: a call passes all parts of a tuple, which would take 2 % of the loop
            descend_rows(rows[to], data, order, begin, end, work.slopes, work.chosen, rate)
            status = close_write(control, worker, to)
        if status == BROKEN:
            return made, BROKEN_LOCK
        note(log, made, loss, n)
        made += 1


class SparseWorker(KernelWorker):
    """One worker of a linear model."""

    loop: ClassVar[Any] = staticmethod(sparse_loop)
    _work: SparseWork
    _x: Floats | None = None
    """Its copy of the parameters, where workers share by rows."""

    def run_epoch(self, shared: MappedVector, order: Integers, lr: float) -> int:
        if not shared.sharing.by_rows:
            return super().run_epoch(shared, order, lr)
        if self._x is None:
            self._x = np.zeros(self._kernel.dim, np.float32)
        assert shared.control[STRETCH], "a stretch begins with shared.hand_out"
        batches = -(-max(len(order), self._kernel.samples) // self.batch)
        told = Told(
            shared.beside("slopes", batches * self.batch, np.float32),
            shared.beside("done", batches * LINE, np.int64),
            self._x,
            np.zeros(shared.sharing.workers, np.int64),
        )
        log = Log.empty(-(-len(order) // self.batch))
        spread_out(shared.worker, shared.sharing.workers)
        vector = CompiledVector(shared.control, shared.rows, shared.worker)
        taken, end = loop_by_rows(*self._given_by_rows(vector, told, order, lr, log))
        self.log = log.first(taken)
        return int(end)

    def compile(self) -> None:
        super().compile()
        integers, floats = np.zeros(1, np.int64), np.zeros(1, np.float32)
        vector = CompiledVector(integers, floats[None], 0)
        told = Told(floats, integers, floats, integers)
        given = self._given_by_rows(vector, told, np.zeros(0, np.int64), 0.1, Log.empty(0))
        loop_by_rows.compile(tuple(numba.typeof(value) for value in given))

    def _given_by_rows(
        self, vector: CompiledVector, told: Told, order: Integers, lr: float, log: Log
    ) -> tuple[Any, ...]:
        return vector, Near.itself(vector), told, self._kernel.data, self._work.chosen, order, self.batch, lr, log


class SparseKernel(Kernel):
    """A linear model and its training rows; targets are -1 and 1."""

    by_rows = True
    data: SparseData

    def __init__(
        self,
        pointers: Integers,
        columns: Columns,
        values: Floats,
        targets: Floats,
        rows_with: Integers,
        l2: float,
        hinge: bool,
    ) -> None:
        firsts, groups = pack(pointers, columns, values, len(rows_with))
        decay: Floats = (l2 / np.maximum(1, rows_with)).astype(np.float32)
        self.data = SparseData(firsts, np.diff(pointers), groups, targets, decay, hinge)
        self.samples = len(targets)
        self.dim = len(decay) + 1

    def worker(self, index: int, batch: int, momentum: float = 0.0) -> SparseWorker:
        assert momentum == 0
        touched = Touched.empty(batch * int(self.data.lengths.max()) + 1)
        work = SparseWork(np.zeros(batch, np.float32), np.zeros(batch, np.int64), touched)
        return SparseWorker(self, batch, work)
