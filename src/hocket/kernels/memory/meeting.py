"""Collectives among ranks that map one block: each lays down what it has, all meet, and each takes what it needs.

A rank has two rows of its own, used in turn. What it lays down before meeting m may be read from when all have come to
m until the reader comes to m + 1; the row is written again only for m + 2, and by then all have been at m + 1. So one
meeting for each row's worth of data is enough.

A rank comes to a meeting by counting up the word in its own cache line, and waits until all have: spinning for a
while, then asleep in the kernel. Who finds at once that all are there was the last, and wakes those
who sleep. That is safe because counting up and looking are sequentially consistent: who was missing when a sleeper
looked for the last time comes after it, and finds it among the sleepers.

Sums are formed in the order of the ranks, each element by itself, so that every rank has the same bits every time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.kernels.arrays import copy
from hocket.kernels.jit import kernel
from hocket.kernels.memory.atomics import fetch_add, load, monotonic_ns, pause, sched_yield
from hocket.kernels.memory.futex import sleep_while, wake

Words = NDArray[np.int64]
Array = np.ndarray[Any, np.dtype[Any]]

LINE = 8  # words in 64 bytes
# Options, written once before the ranks meet
SIZE, SHORTEST_SPIN_NS, LONGEST_SPIN_NS, DEADLINE_NS, CROWDED = range(5)
# Words that all ranks write
GATE = LINE  # counted up whenever sleepers are woken
SLEEPERS = 2 * LINE
RANK_AREA = 3 * LINE
# Words of one rank, from its first one
CAME = 0  # meetings that it has come to
MARKS = 1  # what it does at the last one and at the one before, so that a mismatch is found
BEGAN, DONE = LINE, LINE + 1  # the meetings before its collective, and how many rows of that are done
SPIN, SLICE, SINCE = range(LINE + 2, LINE + 5)  # ns to spin, ns to wait in one call (0 is any), when it began to wait
TIMESPEC = LINE + 5  # scratch
RANK_WORDS = 2 * LINE

# How a wait ended
MET, LATE, INTERRUPTED, APART = range(4)
# What is done with the elements of all ranks, in the order of `Op`
SUM, MAX, MIN = range(3)

_PAUSES, _YIELDS = 32, 1  # between two looks at the clock
_NAP_NS = 500_000_000  # the longest sleep: should a rank die before it wakes the others, they find out
_TILE = 2048  # elements that are summed at a time, in the nearest cache
_AT_ONCE = 8192  # bytes that are not worth a second meeting: every rank sums them all


def words_for(size: int) -> int:
    """How many control words so many ranks need."""
    return RANK_AREA + size * RANK_WORDS


@kernel
def _missing(words: Words, meeting: int) -> int:
    """The first rank that has not come yet; the number of ranks if all have."""
    size = words[SIZE]
    for rank in range(size):
        if load(words, RANK_AREA + rank * RANK_WORDS + CAME) < meeting:
            return rank
    return size


@kernel
def _await(words: Words, me: int, meeting: int) -> int:
    """Wait until all have come. Who spins in vain spins less the next time: perhaps its core is what they wait for."""
    size = words[SIZE]
    own = RANK_AREA + me * RANK_WORDS
    spin = own + SPIN
    began = now = monotonic_ns()
    while now - words[own + SINCE] <= words[spin]:
        for _ in range(_YIELDS if words[CROWDED] else _PAUSES):
            if _missing(words, meeting) == size:
                words[spin] = min(2 * words[spin], words[LONGEST_SPIN_NS])
                return MET
            if words[CROWDED]:
                sched_yield()
            else:
                pause()
        now = monotonic_ns()
        if 0 < words[own + SLICE] < now - began:
            return INTERRUPTED
    words[spin] = max(words[spin] // 2, words[SHORTEST_SPIN_NS])
    fetch_add(words, SLEEPERS, 1)
    outcome = _sleep(words, me, meeting, began)
    fetch_add(words, SLEEPERS, -1)
    return outcome


@kernel
def _sleep(words: Words, me: int, meeting: int, began: int) -> int:
    """Sleep until all have come, until the deadline, or for as long as this rank may wait in one call."""
    size = words[SIZE]
    own = RANK_AREA + me * RANK_WORDS
    longest = words[own + SLICE] if words[own + SLICE] > 0 else words[DEADLINE_NS]
    while True:
        gate = load(words, GATE)
        if _missing(words, meeting) == size:
            return MET
        now = monotonic_ns()
        left = words[DEADLINE_NS] - (now - words[own + SINCE])
        if left <= 0:
            return LATE
        left = min(left, began + longest - now)
        if left <= 0:
            return INTERRUPTED
        if sleep_while(words, GATE, gate, min(left, _NAP_NS), own + TIMESPEC):
            return INTERRUPTED


@kernel
def meet(words: Words, me: int, meeting: int, mark: int) -> int:
    """Come to a meeting, unless we have come before, and wait until all have."""
    size = words[SIZE]
    own = RANK_AREA + me * RANK_WORDS
    if words[own + CAME] > meeting:  # before a signal came
        return MET
    if words[own + CAME] < meeting:
        words[own + MARKS + (meeting & 1)] = mark
        fetch_add(words, own + CAME, 1)
        if _missing(words, meeting) == size:
            if load(words, SLEEPERS) > 0:
                fetch_add(words, GATE, 1)
                wake(words, GATE)
            return _alike(words, meeting, mark)
        words[own + SINCE] = monotonic_ns()
    outcome = _await(words, me, meeting)
    return _alike(words, meeting, mark) if outcome == MET else outcome


@kernel
def _alike(words: Words, meeting: int, mark: int) -> int:
    for rank in range(words[SIZE]):
        if words[RANK_AREA + rank * RANK_WORDS + MARKS + (meeting & 1)] != mark:
            return APART
    return MET


@kernel
def _begin(words: Words, me: int, again: bool) -> int:
    """A collective begins, or goes on after a signal. Returns how many rows of it are done."""
    own = RANK_AREA + me * RANK_WORDS
    if not again:
        words[own + BEGAN] = words[own + CAME]
        words[own + DONE] = 0
    return words[own + DONE]


@kernel
def _meeting(words: Words, me: int, number: int) -> int:
    """The meeting after `number` others of this collective."""
    return words[RANK_AREA + me * RANK_WORDS + BEGAN] + number + 1


@kernel
def _comes_first(words: Words, me: int, meeting: int) -> bool:
    """Whether this rank has not come to a meeting before: what it lays down must then stay as it is."""
    return words[RANK_AREA + me * RANK_WORDS + CAME] < meeting


@kernel
def _add(x: Array, other: Array, op: int) -> None:
    """Two ranks' elements become one, in `x`; NaN stays NaN.

    In place, as the compiler sees: where the sum of two arrays may lie on one of them, it takes element by element.
    """
    if op == SUM:
        for i in range(len(x)):
            x[i] += other[i]
    elif op == MAX:
        for i in range(len(x)):
            x[i] = x[i] if x[i] > other[i] or x[i] != x[i] else other[i]
    else:
        for i in range(len(x)):
            x[i] = x[i] if x[i] < other[i] or x[i] != x[i] else other[i]


@kernel
def _reduce(rows: Array, first: int, size: int, begin: int, out: Array, op: int) -> None:
    """What all ranks have laid down from `begin` on, in their order, from the first row of this meeting on."""
    for low in range(0, len(out), _TILE):
        high = min(low + _TILE, len(out))
        tile = out[low:high]
        copy(rows[first, begin + low : begin + high], tile)
        for rank in range(1, size):
            _add(tile, rows[first + rank, begin + low : begin + high], op)


@kernel
def all_reduce(words: Words, rows: Array, me: int, x: Array, op: int, mark: int, again: bool) -> int:
    """Combine `x` over all ranks, in place."""
    size, room = words[SIZE], rows.shape[1]
    if size == 2 or len(x) * x.itemsize <= _AT_ONCE:
        return _all_at_once(words, rows, me, x, op, mark, again)
    for number in range(_begin(words, me, again), -(-len(x) // room)):
        part = x[number * room : min((number + 1) * room, len(x))]
        meeting = _meeting(words, me, 2 * number)
        first, other = (meeting & 1) * size, (meeting + 1 & 1) * size
        if _comes_first(words, me, meeting):
            copy(part, rows[first + me, : len(part)])
        outcome = meet(words, me, meeting, mark)
        if outcome != MET:
            return outcome
        if _comes_first(words, me, meeting + 1):
            begin, end = _slice(len(part), size, me)
            _reduce(rows, first, size, begin, rows[other + me, begin:end], op)
        outcome = meet(words, me, meeting + 1, mark)
        if outcome != MET:
            return outcome
        for rank in range(size):
            begin, end = _slice(len(part), size, rank)
            copy(rows[other + rank, begin:end], part[begin:end])
        words[RANK_AREA + me * RANK_WORDS + DONE] += 1
    return MET


@kernel
def _all_at_once(words: Words, rows: Array, me: int, x: Array, op: int, mark: int, again: bool) -> int:
    """Every rank combines everything: one meeting a row, where ranks or elements are few."""
    size, room = words[SIZE], rows.shape[1]
    for number in range(_begin(words, me, again), -(-len(x) // room)):
        part = x[number * room : min((number + 1) * room, len(x))]
        meeting = _meeting(words, me, number)
        first = (meeting & 1) * size
        if _comes_first(words, me, meeting):
            copy(part, rows[first + me, : len(part)])
        outcome = meet(words, me, meeting, mark)
        if outcome != MET:
            return outcome
        if size == 2:
            _add(part, rows[first + 1 - me, : len(part)], op)
        else:
            _reduce(rows, first, size, 0, part, op)
        words[RANK_AREA + me * RANK_WORDS + DONE] += 1
    return MET


@kernel
def _slice(length: int, size: int, rank: int) -> tuple[int, int]:
    """What a rank combines of a row; slices begin at multiples of a cache line, whatever the type."""
    step = (-(-length // size) + 63) // 64 * 64
    return min(rank * step, length), min((rank + 1) * step, length)


@kernel
def reduce_scatter(words: Words, rows: Array, me: int, x: Array, out: Array, op: int, mark: int, again: bool) -> int:
    """Rank r gets the r-th part of the combined `x`."""
    size = words[SIZE]
    room = rows.shape[1] // size
    for number in range(_begin(words, me, again), -(-len(out) // room)):
        low, high = number * room, min((number + 1) * room, len(out))
        meeting = _meeting(words, me, number)
        first = (meeting & 1) * size
        if _comes_first(words, me, meeting):
            for rank in range(size):
                begin = rank * len(out)
                copy(x[begin + low : begin + high], rows[first + me, rank * room : rank * room + high - low])
        outcome = meet(words, me, meeting, mark)
        if outcome != MET:
            return outcome
        _reduce(rows, first, size, me * room, out[low:high], op)
        words[RANK_AREA + me * RANK_WORDS + DONE] += 1
    return MET


@kernel
def all_gather(words: Words, rows: Array, me: int, x: Array, out: Array, mark: int, again: bool) -> int:
    """Every rank gets every rank's `x`, in their order."""
    size, room = words[SIZE], rows.shape[1]
    for number in range(_begin(words, me, again), -(-len(x) // room)):
        low, high = number * room, min((number + 1) * room, len(x))
        meeting = _meeting(words, me, number)
        first = (meeting & 1) * size
        if _comes_first(words, me, meeting):
            copy(x[low:high], rows[first + me, : high - low])
        outcome = meet(words, me, meeting, mark)
        if outcome != MET:
            return outcome
        for rank in range(size):
            begin = rank * len(x)
            copy(rows[first + rank, : high - low], out[begin + low : begin + high])
        words[RANK_AREA + me * RANK_WORDS + DONE] += 1
    return MET


@kernel
def broadcast(words: Words, rows: Array, me: int, x: Array, root: int, mark: int, again: bool) -> int:
    """Every rank gets `root`'s x."""
    size, room = words[SIZE], rows.shape[1]
    for number in range(_begin(words, me, again), -(-len(x) // room)):
        part = x[number * room : min((number + 1) * room, len(x))]
        meeting = _meeting(words, me, number)
        row = (meeting & 1) * size + root
        if me == root and _comes_first(words, me, meeting):
            copy(part, rows[row, : len(part)])
        outcome = meet(words, me, meeting, mark)
        if outcome != MET:
            return outcome
        if me != root:
            copy(rows[row, : len(part)], part)
        words[RANK_AREA + me * RANK_WORDS + DONE] += 1
    return MET


@kernel
def barrier(words: Words, me: int, mark: int, again: bool) -> int:
    """All ranks meet."""
    _begin(words, me, again)
    return meet(words, me, _meeting(words, me, 0), mark)
