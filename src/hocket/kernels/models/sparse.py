"""Linear models on sparse rows, compiled: logistic regression and the linear support vector machine.

The parameters are one weight a column, then the bias. The penalty is that of HOGWILD! (Niu et al. 2011, section 3):
l2 w_j^2 / (2 d_j) in every row that has column j, where d_j is the number of such rows. Over an epoch it adds up to
l2 |w|^2 / 2, and no update touches a weight outside its rows. As many rows of a support vector
machine have no loss, and would be written for the penalty alone, one row in PAID_TOGETHER pays for all of them.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

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
from hocket.kernels.memory.words import BROKEN, GAP, HANDLING, NO_ROW, RETRY, WORKERS
from hocket.kernels.models.family import (
    BROKEN_LOCK,
    DIVERGED,
    Kernel,
    KernelWorker,
    Log,
    note,
    portion,
    stop_all,
    take_batch,
)
from hocket.kernels.models.packed import Firsts, Groups, add_row, element, pack, score, shrink_and_add_row

AHEAD = 4  # rows
PAID_TOGETHER = 16
"""The first of so many rows in the order pays the penalty for all. In a random order that leaves the mean as it is."""


class SparseData(NamedTuple):
    """The rows, their targets, and what the penalty is on each weight."""

    firsts: Firsts
    lengths: Integers
    groups: Groups
    targets: Floats
    decay: Floats
    hinge: bool


class SparseWork(NamedTuple):
    """One worker's workspace for a batch."""

    slopes: Floats
    chosen: Integers
    """Scratch."""
    touched: Touched


@kernel
def loss_and_slope(hinge: bool, score: np.float32, target: np.float32) -> tuple[np.float32, np.float32]:
    """A row's loss, and its derivative by the score."""
    margin = target * score
    if hinge:
        return max(np.float32(0), np.float32(1) - margin), -target if margin < 1 else np.float32(0)
    small = np.exp(-abs(margin))  # never above 1, so nothing overflows
    loss = np.log1p(small) + max(np.float32(0), -margin)
    return loss, -target * (small if margin > 0 else np.float32(1)) / (np.float32(1) + small)


@kernel
def score_rows(x: Floats, data: SparseData, order: Integers, begin: int, end: int, skip: int, slopes: Floats) -> float:
    """The mean loss of the rows from `begin` to `end` of the order, and each one's slope.

    `skip` is how far behind `end` this worker is likely to go on.
    """
    firsts, _, groups, targets, decay, hinge = data
    bias = x[decay.size]
    loss = 0.0
    for at in range(begin, end):
        ahead = at + AHEAD if at + AHEAD < end else at + AHEAD + skip
        soon = firsts[order[min(ahead, order.size - 1)]]
        row = order[at]
        product = score(x, groups, firsts[row], firsts[row + 1], soon)
        row_loss, slopes[at - begin] = loss_and_slope(hinge, bias + product, targets[row])
        loss += row_loss
    return loss / (end - begin)


@kernel
def descend_rows(
    x: Floats,
    data: SparseData,
    order: Integers,
    begin: int,
    end: int,
    slopes: Floats,
    chosen: Integers,
    step: np.float32,
) -> None:
    """x -= step times the gradient of the rows from `begin` to `end` of the order, and of the penalty that they pay.

    A penalty may bring a weight to 0, but never beyond. `chosen` is scratch.
    """
    firsts, lengths, groups, _, decay, _ = data
    total = np.float32(0)
    count = 0
    for at in range(begin, end):  # the rows with a slope are listed first: a branch would be mispredicted for many
        slope = slopes[at - begin]
        total += slope
        chosen[count] = at
        count += (slope != 0) & (at % PAID_TOGETHER != 0)
    for k in range(count):
        row = order[chosen[k]]
        add_row(x, groups, firsts[row], firsts[row + 1], -step * slopes[chosen[k] - begin])
    for at in range(-(-begin // PAID_TOGETHER) * PAID_TOGETHER, end, PAID_TOGETHER):
        row = order[at]
        strength = step * np.float32(min(PAID_TOGETHER, order.size - at))
        change = step * slopes[at - begin]
        shrink_and_add_row(x, groups, firsts[row], lengths[row], strength, decay, -change)
    x[decay.size] -= step * total


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


class SparseKernel(Kernel):
    """A linear model and its training rows; targets are -1 and 1."""

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
