"""Streams of bytes between ranks that map one block: a ring for each two of them, one in each direction.

A ring has one writer and one reader. Each counts the bytes that it has written, or taken, in a cache line of its own,
so that neither ever waits for the other inside a call. Who has to wait, for bytes or for room, waits at its own bell:
all others ring that after they have changed something it may wait for. No ring is missed: who goes to sleep says so
before it looks at its bell for the last time, and who rings looks for sleepers after it has rung.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hocket.kernels.arrays import copy
from hocket.kernels.jit import kernel
from hocket.kernels.memory.atomics import fetch_add, load, monotonic_ns, pause, sched_yield, store
from hocket.kernels.memory.futex import sleep_while, wake

Words = NDArray[np.int64]
Bytes = NDArray[np.uint8]

LINE = 8  # words in 64 bytes
# Options, written once before the ranks meet
SIZE, SPIN_NS, CROWDED = range(3)
RANK_AREA = LINE
# Words of one rank, from its first one
BELL, ASLEEP, TIMESPEC = 0, 1, 2
# Words of a ring, from its first one: of who writes, and in another line of who reads
WRITTEN, TAKEN = 0, LINE
RING_WORDS = 2 * LINE

# How a wait ended
RUNG, LATE, INTERRUPTED = range(3)

_PAUSES = 32  # between two looks at the clock
_NAP_NS = 500_000_000  # the longest sleep
_PIECE = 1 << 16  # bytes after which the other may begin


def words_for(size: int) -> int:
    """How many control words so many ranks need."""
    return RANK_AREA + size * LINE + rings_for(size) * RING_WORDS


def rings_for(size: int) -> int:
    return size * (size - 1)


@kernel
def _ring_of(size: int, writer: int, reader: int) -> int:
    return writer * (size - 1) + reader - (1 if reader > writer else 0)


@kernel
def _counts(words: Words, ring: int) -> int:
    """Where the words of a ring begin."""
    return RANK_AREA + words[SIZE] * LINE + ring * RING_WORDS


@kernel
def _ring_bell(words: Words, rank: int) -> None:
    own = RANK_AREA + rank * LINE
    fetch_add(words, own + BELL, 1)
    if load(words, own + ASLEEP) > 0:
        wake(words, own + BELL)


@kernel
def put(words: Words, rings: Bytes, me: int, to: int, data: Bytes, done: int) -> int:
    """Write what there is room for of `data` behind its first `done` bytes; returns how many are done then."""
    return _move(words, rings, _ring_of(words[SIZE], me, to), to, data, done, True)


@kernel
def take(words: Words, rings: Bytes, me: int, source: int, out: Bytes, done: int) -> int:
    """Read what has come into `out`, behind its first `done` bytes; returns how many are done then."""
    return _move(words, rings, _ring_of(words[SIZE], source, me), source, out, done, False)


@kernel
def _move(words: Words, rings: Bytes, ring: int, other: int, data: Bytes, done: int, writes: bool) -> int:
    """A writer may go on until it is a whole ring ahead of the reader, a reader until it is where the writer is."""
    at, room = _counts(words, ring), rings.shape[1]
    mine, theirs, ahead = (at + WRITTEN, at + TAKEN, room) if writes else (at + TAKEN, at + WRITTEN, 0)
    while done < len(data):
        moved = words[mine]
        begin = moved % room
        count = min(len(data) - done, load(words, theirs) + ahead - moved, room - begin, _PIECE)
        if count == 0:
            break
        here, there = data[done : done + count], rings[ring, begin : begin + count]
        if writes:
            copy(here, there)
        else:
            copy(there, here)
        store(words, mine, moved + count)
        _ring_bell(words, other)
        done += count
    return done


@kernel
def next_source(words: Words, me: int, first: int) -> int:
    """The first rank from this one on of which there is something to take; -1 is none."""
    size = words[SIZE]
    for source in range(first, size):
        if source != me:
            at = _counts(words, _ring_of(size, source, me))
            if load(words, at + WRITTEN) != words[at + TAKEN]:
                return source
    return -1


@kernel
def heard(words: Words, me: int) -> int:
    """How often this rank's bell has rung."""
    return load(words, RANK_AREA + me * LINE + BELL)


@kernel
def await_bell(words: Words, me: int, before: int, ns: int) -> int:
    """Wait until the bell has rung since it had rung `before` times, but no longer than `ns`."""
    bell = RANK_AREA + me * LINE + BELL
    began = now = monotonic_ns()
    while now - began <= min(words[SPIN_NS], ns):
        for _ in range(1 if words[CROWDED] else _PAUSES):
            if load(words, bell) != before:
                return RUNG
            pause()
        sched_yield()  # who is to ring may wait for this very core
        now = monotonic_ns()
    outcome = LATE
    fetch_add(words, bell + ASLEEP, 1)
    while outcome == LATE and now - began < ns:
        if load(words, bell) != before:
            outcome = RUNG
        elif sleep_while(words, bell, before, min(began + ns - now, _NAP_NS), bell + TIMESPEC):
            outcome = INTERRUPTED
        now = monotonic_ns()
    fetch_add(words, bell + ASLEEP, -1)
    return outcome
