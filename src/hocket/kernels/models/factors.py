"""Matrix factorisation of ratings, compiled: an update touches a user's and an item's factors and biases.

The parameters are the factors of all users [users, rank], those of all items [items, rank], the users' biases and the
items' biases.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from hocket.kernels.jit import kernel
from hocket.kernels.memory.gather import View
from hocket.kernels.memory.scatter import scatter
from hocket.kernels.memory.updates import begin_together, close_read, open_read
from hocket.kernels.memory.words import BROKEN, NO_ROW
from hocket.kernels.models.family import (
    BROKEN_LOCK,
    DIVERGED,
    FASTMATH,
    Columns,
    Floats,
    Integers,
    Kernel,
    KernelWorker,
    note,
    stop_all,
    take_batch,
)


@kernel(fastmath=FASTMATH)
def rating_gradient(
    x: Floats,
    pairs: Integers,
    ratings: Floats,
    users: int,
    items: int,
    rank: int,
    mean: float,
    l2: float,
    chosen: Integers,
    touched: Columns,
    seen: Floats,
    g: Floats,
) -> tuple[float, int]:
    """The mean squared error of the chosen ratings at x, and how many elements of `touched`, `seen`, `g` it filled."""
    n = chosen.size
    decay = np.float32(l2 / n)
    loss = 0.0
    at = 0
    for sample in chosen:
        user, item = pairs[sample, 0], pairs[sample, 1]
        p_at, q_at = user * rank, (users + item) * rank
        user_bias_at = (users + items) * rank + user
        item_bias_at = (users + items) * rank + users + item
        p, q = x[p_at : p_at + rank], x[q_at : q_at + rank]
        user_bias, item_bias = x[user_bias_at], x[item_bias_at]
        product = np.float32(0)
        for f in range(rank):
            touched[at + f], seen[at + f] = p_at + f, p[f]
            touched[at + rank + f], seen[at + rank + f] = q_at + f, q[f]
            product += seen[at + f] * seen[at + rank + f]
        error = np.float32(mean) + user_bias + item_bias + product - ratings[sample]
        loss += error * error
        slope = np.float32(2) * error / np.float32(n)
        for f in range(rank):
            g[at + f] = slope * seen[at + rank + f] + decay * seen[at + f]
            g[at + rank + f] = slope * seen[at + f] + decay * seen[at + rank + f]
        at += 2 * rank
        touched[at], seen[at], g[at] = user_bias_at, user_bias, slope + decay * user_bias
        touched[at + 1], seen[at + 1], g[at + 1] = item_bias_at, item_bias, slope + decay * item_bias
        at += 2
    return loss / n, at


@kernel
def factor_loop(
    shared: View,
    near: View,
    start: Floats,
    gained: Floats,
    pairs: Integers,
    ratings: Floats,
    users: int,
    items: int,
    rank: int,
    mean: float,
    l2: float,
    order: Integers,
    batch: int,
    lr: float,
    touched: Columns,
    seen: Floats,
    g: Floats,
    step: Floats,
    log_loss: Floats,
    log_samples: Integers,
    log_clock: Integers,
) -> tuple[int, int]:
    """A worker's part of an epoch: batches taken, and how it ended."""
    dim = (users + items) * (rank + 1)
    made = 0
    begin_together(shared.control)
    while True:
        begin = take_batch(shared, near, start, gained, dim, made, batch, order.size, lr)
        if begin < 0:
            return made, ~begin
        chosen = order[begin : min(begin + batch, order.size)]
        read = open_read(near.control, near.worker)
        if read == NO_ROW:
            return made, BROKEN_LOCK
        loss, count = rating_gradient(
            near.rows[read], pairs, ratings, users, items, rank, mean, l2, chosen, touched, seen, g
        )
        close_read(near.control, near.worker, read)
        if not np.isfinite(loss):
            stop_all(shared.control)
            note(log_loss, log_samples, log_clock, made, loss, chosen.size)
            return made + 1, DIVERGED
        if scatter(near.control, near.rows, near.worker, dim, touched, seen, g, step, count, lr) == BROKEN:
            return made, BROKEN_LOCK
        note(log_loss, log_samples, log_clock, made, loss, chosen.size)
        made += 1


class FactorWorker(KernelWorker):
    """One worker's workspace: the touched elements of a batch."""

    loop: ClassVar[Any] = staticmethod(factor_loop)

    def __init__(self, kernel: FactorKernel, index: int, batch: int) -> None:
        super().__init__(index, batch, kernel.dim)
        capacity = batch * 2 * (kernel.rank + 1)
        self._kernel = kernel
        self._touched = np.zeros(capacity, np.int32)
        self._seen, self._g, self._step = (np.zeros(capacity, np.float32) for _ in range(3))

    def arguments(self, order: Integers, lr: float) -> tuple[Any, ...]:
        k = self._kernel
        problem = k.pairs, k.ratings, k.users, k.items, k.rank, k.mean, k.l2
        return (*problem, order, self.batch, float(lr), self._touched, self._seen, self._g, self._step)


class FactorKernel(Kernel):
    """A factorisation and the ratings that it is trained on."""

    def __init__(
        self, pairs: Integers, ratings: Floats, users: int, items: int, rank: int, mean: float, l2: float
    ) -> None:
        self.pairs, self.ratings = np.ascontiguousarray(pairs), np.ascontiguousarray(ratings)
        self.users, self.items, self.rank, self.mean, self.l2 = users, items, rank, mean, l2
        self.samples = len(ratings)
        self.dim = (users + items) * (rank + 1)

    def worker(self, index: int, batch: int, momentum: float = 0.0) -> FactorWorker:
        assert momentum == 0
        return FactorWorker(self, index, batch)
