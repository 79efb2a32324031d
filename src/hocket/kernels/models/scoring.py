"""What linear models compute on sparse rows: scores, losses, and a descent along the rows that have a slope.

The parameters are one weight a column, then the bias. The penalty is that of HOGWILD! (Niu et al. 2011, section 3):
l2 w_j^2 / (2 d_j) in every row that has column j, where d_j is the number of such rows. Over an epoch it adds up to
l2 |w|^2 / 2, and no update touches a weight outside its rows. As many rows of a support vector
machine have no loss, and would be written for the penalty alone, one row in PAID_TOGETHER pays for all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.kernels.arrays import Floats, Integers
from hocket.kernels.jit import kernel
from hocket.kernels.models.packed import Firsts, Groups, add_row, fetch_row, score, shrink_and_add_row

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
    far: bool = False,
) -> None:
    """x -= step times the gradient of the rows from `begin` to `end` of the order, and of the penalty that they pay.

    A penalty may bring a weight to 0, but never beyond. `chosen` is scratch. Rows that are `far` were not just read.
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
        if far:
            soon = order[chosen[min(k + 2, count - 1)]]
            fetch_row(groups, firsts[soon], firsts[soon + 1])
        add_row(x, groups, firsts[row], firsts[row + 1], -step * slopes[chosen[k] - begin])
    for at in range(-(-begin // PAID_TOGETHER) * PAID_TOGETHER, end, PAID_TOGETHER):
        row = order[at]
        strength = step * np.float32(min(PAID_TOGETHER, order.size - at))
        change = step * slopes[at - begin]
        shrink_and_add_row(x, groups, firsts[row], lengths[row], strength, decay, -change)
    x[decay.size] -= step * total
