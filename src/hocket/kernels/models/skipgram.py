"""Skip-gram with negative sampling, compiled: small matrix products of rows that stay in registers and cache.

The parameters are the vectors of all words as inputs [words, dim], then as outputs. Each word around a centre, as
input, shall tell the centre, as output, from words drawn at random. As these are the same for all inputs of a window,
their scores are one product of two small matrices, and the updates of inputs and outputs two more (Ji et al. 2016).
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hocket.core.seeds import stream
from hocket.core.sharing import SMALLEST_LR
from hocket.kernels.arrays import Columns, Floats, Integers, apart
from hocket.kernels.jit import kernel
from hocket.kernels.lanes import LANES, add, load_first, multiply_add, spread, store_first, total
from hocket.kernels.memory.gather import CompiledVector, Near
from hocket.kernels.memory.scatter import Touched, scatter
from hocket.kernels.memory.tempering import factor
from hocket.kernels.memory.updates import begin_together, close_read, close_write, open_read, open_write, staleness
from hocket.kernels.memory.words import APPLIED, BROKEN, GAP, HANDLING, HOGWILD, METHOD, NO_ROW
from hocket.kernels.models.family import BROKEN_LOCK, DIVERGED, Kernel, KernelWorker, Log, note, stop_all, take_batch
from hocket.kernels.models.windows import Text, Windows, Words64, draw
from hocket.kernels.nearness import prefetch_to_write

GROUP = 6
"""Outputs that are scored and changed together: a centre and five negatives, in as many registers."""
AHEAD = 2
"""Windows between the fetching of a row and its use."""
LOOKED_AT = 16
"""One window in so many has its loss computed."""
ZERO: Any = np.int64(0)
"""Functions that are given a plain 0 would be compiled for it, and once more for all other numbers."""
SCORE_MAX, SCORE_BINS = 6.0, 1000
"""The sigmoid comes from a table, as in word2vec; beyond it a pair counts as if it were at its edge."""


class WordData(NamedTuple):
    """The text, and the vectors' length."""

    text: Text
    words: int
    dim: int
    sigmoid: Floats


class WordWork(NamedTuple):
    """One worker's workspace."""

    random: Words64
    windows: Windows
    inputs: Integers
    """Where in the parameters the rows of a window begin."""
    outputs: Integers
    slopes: Floats
    """[inputs, outputs] of a window: scores at first, then what each pair adds."""
    seats: Columns
    """Of each row: its number in a worker's own copy plus 1, or 0."""
    rows: Columns
    """The other way round."""
    touched: Touched
    """The own copy is in `g`, until it becomes the gradient."""
    fall: Floats
    """One number: what the rate falls by from batch to batch."""


@kernel(fastmath={"reassoc", "contract", "nsz"})
def score_pair(x: Floats, a: int, b: int, outputs: Integers, first: int, dim: int, slopes: Floats, to: int) -> None:
    """The products of two inputs with a group of outputs."""
    o0, o1, o2 = outputs[first], outputs[first + 1], outputs[first + 2]
    o3, o4, o5 = outputs[first + 3], outputs[first + 4], outputs[first + 5]
    a0 = a1 = a2 = a3 = a4 = a5 = b0 = b1 = b2 = b3 = b4 = b5 = spread(np.float32(0))
    for d in range(0, dim, LANES):
        n = min(LANES, dim - d)
        u, v = load_first(x, a + d, n), load_first(x, b + d, n)
        o = load_first(x, o0 + d, n)
        a0, b0 = multiply_add(u, o, a0), multiply_add(v, o, b0)
        o = load_first(x, o1 + d, n)
        a1, b1 = multiply_add(u, o, a1), multiply_add(v, o, b1)
        o = load_first(x, o2 + d, n)
        a2, b2 = multiply_add(u, o, a2), multiply_add(v, o, b2)
        o = load_first(x, o3 + d, n)
        a3, b3 = multiply_add(u, o, a3), multiply_add(v, o, b3)
        o = load_first(x, o4 + d, n)
        a4, b4 = multiply_add(u, o, a4), multiply_add(v, o, b4)
        o = load_first(x, o5 + d, n)
        a5, b5 = multiply_add(u, o, a5), multiply_add(v, o, b5)
    at, beside = slopes[to, first:], slopes[to + 1, first:]
    at[0], at[1], at[2], at[3], at[4], at[5] = total(a0), total(a1), total(a2), total(a3), total(a4), total(a5)
    beside[0], beside[1], beside[2] = total(b0), total(b1), total(b2)
    beside[3], beside[4], beside[5] = total(b3), total(b4), total(b5)


@kernel(fastmath={"reassoc", "contract", "nsz"})
def step_group(
    x: Floats, inputs: Integers, count: int, outputs: Integers, first: int, dim: int, slopes: Floats
) -> None:
    """Add slopes times outputs to the inputs, and slopes times inputs to a group of outputs.

    A row that is there twice gets both; so outputs are read again before they are written.
    """
    o0, o1, o2 = outputs[first], outputs[first + 1], outputs[first + 2]
    o3, o4, o5 = outputs[first + 3], outputs[first + 4], outputs[first + 5]
    zero = spread(np.float32(0))
    for d in range(0, dim, LANES):
        n = min(LANES, dim - d)
        p0, p1, p2 = load_first(x, o0 + d, n), load_first(x, o1 + d, n), load_first(x, o2 + d, n)
        p3, p4, p5 = load_first(x, o3 + d, n), load_first(x, o4 + d, n), load_first(x, o5 + d, n)
        g0 = g1 = g2 = g3 = g4 = g5 = zero
        for c in range(count):
            at = inputs[c] + d
            v = load_first(x, at, n)
            s0, s1, s2 = spread(slopes[c, first]), spread(slopes[c, first + 1]), spread(slopes[c, first + 2])
            s3, s4, s5 = spread(slopes[c, first + 3]), spread(slopes[c, first + 4]), spread(slopes[c, first + 5])
            g0, g1, g2 = multiply_add(s0, v, g0), multiply_add(s1, v, g1), multiply_add(s2, v, g2)
            g3, g4, g5 = multiply_add(s3, v, g3), multiply_add(s4, v, g4), multiply_add(s5, v, g5)
            # In two sums, as one would wait for each of its additions
            even = multiply_add(s4, p4, multiply_add(s2, p2, multiply_add(s0, p0, v)))
            odd = multiply_add(s5, p5, multiply_add(s3, p3, multiply_add(s1, p1, zero)))
            store_first(x, at, n, add(even, odd))
        store_first(x, o0 + d, n, add(load_first(x, o0 + d, n), g0))
        store_first(x, o1 + d, n, add(load_first(x, o1 + d, n), g1))
        store_first(x, o2 + d, n, add(load_first(x, o2 + d, n), g2))
        store_first(x, o3 + d, n, add(load_first(x, o3 + d, n), g3))
        store_first(x, o4 + d, n, add(load_first(x, o4 + d, n), g4))
        store_first(x, o5 + d, n, add(load_first(x, o5 + d, n), g5))


@kernel
def fetch_row(x: Floats, at: int, dim: int) -> None:
    for d in range(0, dim + LANES - 1, LANES):
        prefetch_to_write(x, at + d)


@kernel
def fetch_window(x: Floats, windows: Windows, i: int, last: int, behind: int, reach: int, dim: int) -> None:
    """Begin to bring the rows near that window i has and those before it had not."""
    words, _, _, negatives = windows
    if i < last:
        fetch_row(x, (behind + words[i]) * dim, dim)
        for k in range(negatives.shape[1]):
            fetch_row(x, (behind + negatives[i, k]) * dim, dim)
    if i + reach < last:
        fetch_row(x, words[i + reach] * dim, dim)


@kernel
def pair_loss(slopes: Floats, count: int, outputs: int) -> float:
    """The mean loss of the inputs of a window, from their scores."""
    loss = 0.0
    for c in range(count):
        for k in range(outputs):
            margin = slopes[c, k] if k == 0 else -slopes[c, k]
            loss += np.log1p(np.exp(-abs(margin))) + max(np.float32(0), -margin)
    return loss / count


@kernel(fastmath={"reassoc", "contract", "nsz"})
def slopes_of_scores(slopes: Floats, count: int, outputs: int, sigmoid: Floats, lr: np.float32) -> None:
    """lr * (label - sigmoid(score)): the label of the first output is 1, that of the others 0."""
    for c in range(count):
        for k in range(outputs):
            score = min(max(slopes[c, k], np.float32(-SCORE_MAX)), np.float32(SCORE_MAX))
            bin_ = int(
                (score + np.float32(SCORE_MAX)) * np.float32((SCORE_BINS - 1) / (2 * SCORE_MAX)) + np.float32(0.5)
            )
            slopes[c, k] = -lr * sigmoid[bin_]
        slopes[c, 0] += lr


@kernel
def train_windows(
    x: Floats,
    behind: int,
    dim: int,
    windows: Windows,
    last: int,
    reach: int,
    work: WordWork,
    sigmoid: Floats,
    lr: float,
) -> float:
    """Train x on the windows up to `last`, one after the other; the mean loss of those looked at.

    A word's output is `behind` rows behind its input.
    """
    words, low, high, negatives = windows
    inputs, outputs, slopes = work.inputs, work.outputs, work.slopes
    count_out = 1 + negatives.shape[1]
    loss, looked = 0.0, 0
    for i in range(last):
        fetch_window(x, windows, i + AHEAD, last, behind, reach, dim)
        count = ZERO
        for j in range(low[i], high[i]):
            if j != i:
                inputs[count] = words[j] * dim
                count += 1
        if count == 0:
            continue
        inputs[count] = inputs[count - 1]  # inputs are scored in twos
        outputs[0] = (behind + words[i]) * dim
        for k in range(1, count_out):
            outputs[k] = (behind + negatives[i, k - 1]) * dim
        for k in range(count_out, outputs.size):
            outputs[k] = outputs[0]  # a group that is not full goes on with a row whose slope is 0
        for first in range(0, count_out, GROUP):
            for c in range(0, count, 2):
                score_pair(x, inputs[c], inputs[c + 1], outputs, first, dim, slopes, c)
        if i % LOOKED_AT == 0:
            loss += pair_loss(slopes, count, count_out)
            looked += 1
        slopes_of_scores(slopes, count, count_out, sigmoid, np.float32(lr))
        for k in range(1, outputs.size):
            if k >= count_out or outputs[k] == outputs[0]:  # a negative that is the centre itself counts for nothing
                for c in range(count):
                    slopes[c, k] = 0
        for first in range(0, count_out, GROUP):
            step_group(x, inputs, count, outputs, first, dim, slopes)
    return loss / max(looked, 1)


@kernel
def take_seat(row: int, work: WordWork, taken: int) -> int:
    """Give a row a number in the worker's own copy; says how many there are."""
    if work.seats[row] == 0:
        work.rows[taken] = row
        work.seats[row] = taken + 1
        return taken + 1
    return taken


@kernel
def gather_rows(x: Floats, data: WordData, windows: Windows, last: int, work: WordWork) -> tuple[int, int]:
    """Copy the rows of all windows, and number the windows' words by them.

    Says how many rows there are, and how many of them are inputs, which come first and in the order of the outputs.
    """
    words, _, _, negatives = windows
    inputs = ZERO
    for i in range(last):
        inputs = take_seat(words[i], work, inputs)
    taken = inputs
    for i in range(last):
        for k in range(negatives.shape[1]):
            taken = take_seat(negatives[i, k], work, taken)
    for i in range(last):
        words[i] = work.seats[words[i]] - 1
        for k in range(negatives.shape[1]):
            negatives[i, k] = work.seats[negatives[i, k]] - 1
    at, seen, copy, _ = work.touched
    for row in range(inputs + taken):
        word = work.rows[row] if row < inputs else data.words + work.rows[row - inputs]
        for d in range(data.dim):
            at[row * data.dim + d] = word * data.dim + d
            seen[row * data.dim + d] = copy[row * data.dim + d] = x[word * data.dim + d]
    for seat in range(taken):
        work.seats[work.rows[seat]] = 0
    return inputs + taken, inputs


@kernel
def train_batch(vector: CompiledVector, data: WordData, work: WordWork, last: int, lr: float) -> tuple[float, int]:
    """One update by the windows up to `last`: their mean loss, and what became of it.

    Without locks the shared rows themselves are trained, window by window. Else it is a copy of those rows, and what
    that changed is added to the shared ones.
    """
    control, rows, worker = vector
    dim = 2 * data.words * data.dim
    in_place = control[METHOD] == HOGWILD and control[HANDLING] < GAP
    at, seen, copy, step = work.touched
    row = open_read(control, worker)
    if row == NO_ROW:
        return 0.0, BROKEN
    if in_place:
        x, behind, taken = rows[row], data.words, 0
        close_read(control, worker, row)
        row = open_write(control, rows, worker, dim)
        lr *= factor(control, worker, staleness(control, worker))
    else:
        x = copy
        taken, behind = gather_rows(rows[row], data, work.windows, last, work)
        close_read(control, worker, row)
    loss = train_windows(x, behind, data.dim, work.windows, last, data.text.window, work, data.sigmoid, lr)
    if in_place:
        return loss, close_write(control, worker, row)
    if not np.isfinite(loss):
        return loss, APPLIED
    scale = lr if lr > SMALLEST_LR else 1.0
    for k in range(taken * data.dim):
        copy[k] = (seen[k] - copy[k]) / np.float32(scale)
    return loss, scatter(vector, dim, Touched(at, seen, copy, step), taken * data.dim, scale)


@kernel
def skipgram_loop(
    shared: CompiledVector,
    near: Near,
    data: WordData,
    work: WordWork,
    order: Integers,
    batch: int,
    lr: float,
    log: Log,
) -> tuple[int, int]:
    """A worker's part of an epoch: batches taken, and how it ended. A sample is a piece of the text."""
    made = ZERO
    begin_together(shared.control)
    while True:
        begin = take_batch(shared, near, 2 * data.words * data.dim, made, batch, order.size, lr)
        if begin < 0:
            return made, ~begin
        n = min(begin + batch, order.size) - begin
        last = ZERO
        for at in range(begin, begin + n):
            last = draw(data.text, order[at], work.random, work.windows, last)
        # The last batch of an epoch may be small; its pieces count as much as all others
        rate = max(lr - work.fall[0] * (begin // batch), 0.0)
        loss, status = train_batch(near.vector, data, work, last, rate / batch)
        if not np.isfinite(loss):
            stop_all(shared.control)
            note(log, made, loss, n)
            return made + 1, DIVERGED
        if status == BROKEN:
            return made, BROKEN_LOCK
        note(log, made, loss, n)
        made += 1


class SkipGramWorker(KernelWorker):
    """One worker of word2vec."""

    loop: ClassVar[Any] = staticmethod(skipgram_loop)
    falls: ClassVar[bool] = True
    _work: WordWork

    def fall(self, each: float) -> None:
        self._work.fall[0] = each

    def kept(self) -> dict[str, Tensor]:
        return {"random": torch.from_numpy(self._work.random.view(np.int64))}


class SkipGramKernel(Kernel):
    """Word vectors of length `dim`, and the text that they are trained on."""

    data: WordData

    def __init__(self, text: Text, dim: int, seed: int) -> None:
        words = len(text.alias)
        scores = np.linspace(-SCORE_MAX, SCORE_MAX, SCORE_BINS)
        self.data = WordData(text, words, dim, (1 / (1 + np.exp(-scores))).astype(np.float32))
        self.samples, self.dim, self._seed = text.pieces, 2 * words * dim, seed

    def hot(self, share: float) -> list[slice]:
        """The most frequent words come first."""
        words, dim = self.data.words, self.data.dim
        end = math.ceil(share * words) * dim
        return [slice(0, end), slice(words * dim, words * dim + end)] if end else []

    def worker(self, index: int, batch: int, momentum: float = 0.0) -> SkipGramWorker:
        assert momentum == 0
        text, words, dim, _ = self.data
        windows = Windows.empty(batch * text.piece, text.negative)
        seats = min(len(windows.words) * (1 + text.negative), words)
        inputs, outputs = 2 * text.window + 2, -(-(1 + text.negative) // GROUP) * GROUP
        random = apart(1, np.uint64)
        random[0] = stream(self._seed, "windows", index)
        work = WordWork(
            random,
            windows,
            apart(inputs, np.int64),
            apart(outputs, np.int64),
            apart((inputs, outputs), np.float32),
            np.zeros(words, np.int32),
            np.zeros(seats, np.int32),
            Touched.empty(2 * seats * dim),  # no memory until it is written
            np.zeros(1, np.float32),
        )
        return SkipGramWorker(self, batch, work)
