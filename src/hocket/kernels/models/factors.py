"""Matrix factorization of ratings, compiled: an update touches a user's and an item's factors and biases.

The parameters are the factors of all users [users, rank], those of all items [items, rank], the users' biases and the
items' biases.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import numpy as np

from hocket.kernels.arrays import Floats, Integers
from hocket.kernels.jit import kernel
from hocket.kernels.memory.gather import CompiledVector, Near
from hocket.kernels.memory.scatter import Touched, scatter
from hocket.kernels.memory.updates import begin_together, close_read, open_read
from hocket.kernels.memory.words import BROKEN, NO_ROW
from hocket.kernels.models.family import (
    BROKEN_LOCK,
    DIVERGED,
    FASTMATH,
    Kernel,
    KernelWorker,
    Log,
    note,
    portion,
    stop_all,
    take_batch,
)


class FactorData(NamedTuple):
    """The ratings, and how the parameters for their users and items lie."""

    pairs: Integers
    ratings: Floats
    users: int
    items: int
    rank: int
    mean: float
    l2: float


@kernel(fastmath=FASTMATH)
def rating_gradient(x: Floats, data: FactorData, chosen: Integers, touched: Touched) -> tuple[float, int]:
    """The mean squared error of the chosen ratings at x, and how many elements of `touched` it filled."""
    pairs, ratings, users, items, rank, mean, l2 = data
    coordinates, seen, g, _ = touched
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
            coordinates[at + f], seen[at + f] = p_at + f, p[f]
            coordinates[at + rank + f], seen[at + rank + f] = q_at + f, q[f]
            product += seen[at + f] * seen[at + rank + f]
        error = np.float32(mean) + user_bias + item_bias + product - ratings[sample]
        loss += error * error
        slope = np.float32(2) * error / np.float32(n)
        for f in range(rank):
            g[at + f] = slope * seen[at + rank + f] + decay * seen[at + f]
            g[at + rank + f] = slope * seen[at + f] + decay * seen[at + rank + f]
        at += 2 * rank
        coordinates[at], seen[at], g[at] = user_bias_at, user_bias, slope + decay * user_bias
        coordinates[at + 1], seen[at + 1], g[at + 1] = item_bias_at, item_bias, slope + decay * item_bias
        at += 2
    return loss / n, at


@kernel
def factor_loop(
    shared: CompiledVector,
    near: Near,
    data: FactorData,
    work: Touched,
    order: Integers,
    batch: int,
    lr: float,
    log: Log,
) -> tuple[int, int]:
    """A worker's part of an epoch: batches taken, and how it ended."""
    dim = (data.users + data.items) * (data.rank + 1)
    control, rows, worker = near.vector
    made = 0
    begin_together(shared.control)
    while True:
        begin = take_batch(shared, near, dim, made, batch, order.size, lr)
        if begin < 0:
            return made, ~begin
        chosen = order[begin : min(begin + batch, order.size)]
        read = open_read(control, worker)
        if read == NO_ROW:
            return made, BROKEN_LOCK
        loss, count = rating_gradient(rows[read], data, chosen, work)
        close_read(control, worker, read)
        if not np.isfinite(loss):
            stop_all(shared.control)
            note(log, made, loss, chosen.size)
            return made + 1, DIVERGED
        if scatter(near.vector, dim, work, count, lr * portion(shared, chosen.size, batch)) == BROKEN:
            return made, BROKEN_LOCK
        note(log, made, loss, chosen.size)
        made += 1


class FactorWorker(KernelWorker):
    """One worker of a factorization."""

    loop: ClassVar[Any] = staticmethod(factor_loop)


class FactorKernel(Kernel):
    """A factorization and the ratings that it is trained on."""

    data: FactorData

    def __init__(
        self, pairs: Integers, ratings: Floats, users: int, items: int, rank: int, mean: float, l2: float
    ) -> None:
        self.data = FactorData(np.ascontiguousarray(pairs), np.ascontiguousarray(ratings), users, items, rank, mean, l2)
        self.samples = len(ratings)
        self.dim = (users + items) * (rank + 1)

    def worker(self, index: int, batch: int, momentum: float = 0.0) -> FactorWorker:
        assert momentum == 0
        return FactorWorker(self, batch, Touched.empty(batch * 2 * (self.data.rank + 1)))
