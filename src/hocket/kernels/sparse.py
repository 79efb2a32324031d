"""Linear models on sparse rows, compiled: logistic regression and the linear support vector machine.

The parameters are one weight a column, then the bias. The penalty is that of HOGWILD! (Niu et al. 2011, section 3):
l2 w_j^2 / (2 d_j) in every row that has column j, where d_j is the number of such rows. Over an epoch it adds up to
l2 |w|^2 / 2, and no update touches a weight outside its rows. As many rows of a support vector
machine have no loss, and would be written for the penalty alone, one row in PAID_TOGETHER pays for all of them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hocket.kernels.compiled import kernel
from hocket.kernels.control import BROKEN, GAP, HANDLING, NO_ROW, RETRY, WORKERS
from hocket.kernels.family import (
    BROKEN_LOCK,
    DIVERGED,
    DONE,
    STOPPED,
    Columns,
    Floats,
    Integers,
    Kernel,
    KernelWorker,
    note,
    stop_all,
)
from hocket.kernels.scatter import scatter
from hocket.kernels.shared import (
    begin_together,
    close_read,
    close_write,
    next_batch,
    open_read,
    open_write,
    staleness,
    stopped,
    temper,
)

# Without a sign, as what may be below 0 costs a test at every access
Pointers = np.ndarray[Any, np.dtype[np.uint64]]
Indices = np.ndarray[Any, np.dtype[np.uint16 | np.uint32]]

LINE = 16  # values in 64 bytes
AHEAD = 4  # rows
PAID_TOGETHER = 16
"""The first of so many rows in the order pays the penalty for all. In a random order that leaves the mean as it is."""


@intrinsic
def _prefetch(typing_context, array, index):  # type: ignore[no-untyped-def]
    """Begin to bring the cache line of `array[index]` near."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        made = context.make_array(signature.args[0])(context, builder, args[0])
        item = cgutils.get_item_pointer(context, builder, signature.args[0], made, [args[1]])
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(prefetch, [builder.bitcast(item, byte), word(0), word(2), word(1)])  # to read, to L2, data
        return context.get_dummy_value()

    return types.void(array, index), codegen


@kernel
def prefetch_row(pointers: Pointers, columns: Indices, values: Floats, targets: Floats, row: int) -> None:
    """Rows come in random order, which no hardware foresees; half of the time would be spent waiting for them."""
    begin, end = pointers[row], pointers[row + 1]
    for k in range(begin, end, np.uint64(LINE)):
        _prefetch(columns, k)
        _prefetch(values, k)
    if end > begin:  # the row may end in one line more
        _prefetch(columns, end - np.uint64(1))
        _prefetch(values, end - np.uint64(1))
    _prefetch(targets, row)


@kernel
def score(x: Floats, columns: Indices, values: Floats, begin: int, end: int) -> np.float32:
    """The product of a row and the weights."""
    total = np.float32(0)
    for k in range(begin, end):
        total += x[columns[k]] * values[k]
    return total


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
def score_rows(
    x: Floats,
    pointers: Pointers,
    columns: Indices,
    values: Floats,
    targets: Floats,
    decay: Floats,
    hinge: bool,
    order: Integers,
    begin: int,
    end: int,
    skip: int,
    slopes: Floats,
) -> float:
    """The mean loss of the rows from `begin` to `end` of the order, and each one's slope.

    `skip` is how far behind `end` this worker is likely to go on.
    """
    bias = x[decay.size]
    loss = 0.0
    for at in range(begin, end):
        ahead = at + AHEAD if at + AHEAD < end else at + AHEAD + skip
        if ahead < order.size:
            prefetch_row(pointers, columns, values, targets, order[ahead])
        row = order[at]
        product = score(x, columns, values, pointers[row], pointers[row + 1])
        row_loss, slopes[at - begin] = loss_and_slope(hinge, bias + product, targets[row])
        loss += row_loss
    return loss / (end - begin)


@kernel
def descend_rows(
    x: Floats,
    pointers: Pointers,
    columns: Indices,
    values: Floats,
    decay: Floats,
    order: Integers,
    begin: int,
    end: int,
    slopes: Floats,
    step: np.float32,
) -> None:
    """x -= step times the gradient of the rows from `begin` to `end` of the order, and of the penalty that they pay.

    A penalty may bring a weight to 0, but never beyond.
    """
    total = np.float32(0)
    for at in range(begin, end):
        first, last = pointers[order[at]], pointers[order[at] + 1]
        change = step * slopes[at - begin]
        total += change
        if at % PAID_TOGETHER == 0:
            strength = step * np.float32(min(PAID_TOGETHER, order.size - at))
            for k in range(first, last):
                column = columns[k]
                kept = max(np.float32(0), np.float32(1) - strength * decay[column])
                x[column] = kept * x[column] - change * values[k]
        elif change != 0:
            for k in range(first, last):
                x[columns[k]] -= change * values[k]
    x[decay.size] -= total


@kernel
def linear_gradient(
    x: Floats,
    pointers: Pointers,
    columns: Indices,
    values: Floats,
    targets: Floats,
    decay: Floats,
    hinge: bool,
    chosen: Integers,
    touched: Columns,
    seen: Floats,
    g: Floats,
) -> tuple[float, int]:
    """The mean loss of the chosen rows at x, and how many elements of `touched`, `seen` and `g` it filled."""
    share = np.float32(1 / chosen.size)
    bias = decay.size
    loss = 0.0
    bias_slope = np.float32(0)
    at = 0
    for row in chosen:
        begin, end = pointers[row], pointers[row + 1]
        row_loss, slope = loss_and_slope(hinge, x[bias] + score(x, columns, values, begin, end), targets[row])
        loss += row_loss
        bias_slope += share * slope
        for k in range(begin, end):
            column = columns[k]
            touched[at], seen[at] = column, x[column]
            g[at] = share * (slope * values[k] + decay[column] * seen[at])
            at += 1
    touched[at], seen[at], g[at] = bias, x[bias], bias_slope
    return loss / chosen.size, at + 1


@kernel
def sparse_loop(
    control: Integers,
    rows: Floats,
    worker: int,
    pointers: Pointers,
    columns: Indices,
    values: Floats,
    targets: Floats,
    decay: Floats,
    hinge: bool,
    order: Integers,
    batch: int,
    lr: float,
    slopes: Floats,
    touched: Columns,
    seen: Floats,
    g: Floats,
    log_loss: Floats,
    log_samples: Integers,
    log_clock: Integers,
) -> tuple[int, int]:
    """A worker's part of an epoch: updates made, and how it ended.

    Handlings of staleness that look at each coordinate get the gradient as a list of touched coordinates.
    """
    dim = decay.size + 1
    listed = control[HANDLING] >= GAP
    skip = (control[WORKERS] - 1) * batch
    problem = pointers, columns, values, targets, decay, hinge
    count = made = 0
    begin_together(control)
    while not stopped(control):
        begin = next_batch(control) * batch
        if begin >= order.size:
            return made, DONE
        end = min(begin + batch, order.size)
        n = end - begin
        read = open_read(control, rows, worker)
        if read == NO_ROW:
            return made, BROKEN_LOCK
        if listed:
            loss, count = linear_gradient(rows[read], *problem, order[begin:end], touched, seen, g)
        else:
            loss = score_rows(rows[read], *problem, order, begin, end, skip, slopes)
        close_read(control, worker, read)
        if not np.isfinite(loss):
            stop_all(control)
            note(log_loss, log_samples, log_clock, made, loss, n)
            return made + 1, DIVERGED
        status = RETRY
        if listed:
            status = scatter(control, rows, worker, dim, touched, seen, g, count, lr)
        while status == RETRY:
            to = open_write(control, rows, worker, dim)
            if to == NO_ROW:
                return made, BROKEN_LOCK
            step = np.float32(lr / n * temper(control, worker, staleness(control, worker)))
            descend_rows(rows[to], pointers, columns, values, decay, order, begin, end, slopes, step)
            status = close_write(control, worker, to)
        if status == BROKEN:
            return made, BROKEN_LOCK
        note(log_loss, log_samples, log_clock, made, loss, n)
        made += 1
    return made, STOPPED


class SparseWorker(KernelWorker):
    """One worker's workspace: the touched elements of a batch."""

    loop: ClassVar[Any] = staticmethod(sparse_loop)

    def __init__(self, kernel: SparseKernel, index: int, batch: int) -> None:
        super().__init__(index, batch)
        capacity = batch * kernel.longest_row + 1
        self._kernel = kernel
        self._slopes = np.zeros(batch, np.float32)
        self._touched = np.zeros(capacity, np.int32)
        self._seen, self._g = np.zeros(capacity, np.float32), np.zeros(capacity, np.float32)

    def arguments(self, order: Integers, lr: float) -> tuple[Any, ...]:
        k = self._kernel
        problem = self.index, k.pointers, k.columns, k.values, k.targets, k.decay, k.hinge, order, self.batch, float(lr)
        return (*problem, self._slopes, self._touched, self._seen, self._g)


class SparseKernel(Kernel):
    """A linear model and its training rows; targets are -1 and 1."""

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
        self.pointers: Pointers = pointers.astype(np.uint64)
        self.columns: Indices = columns.astype(np.uint16 if len(rows_with) <= 1 << 16 else np.uint32)  # less to fetch
        self.values, self.targets = values, targets
        self.decay: Floats = (l2 / np.maximum(1, rows_with)).astype(np.float32)
        self.hinge = hinge
        self.samples = len(targets)
        self.dim = len(self.decay) + 1
        self.longest_row = int(np.diff(pointers).max())

    def worker(self, index: int, batch: int, momentum: float = 0.0) -> SparseWorker:
        assert momentum == 0
        return SparseWorker(self, index, batch)
