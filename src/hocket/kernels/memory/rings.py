"""Streams of bytes between ranks that map one block: a ring for each two of them, one in each direction.

A ring has one writer and one reader. Each counts the bytes that it has written, or taken, in a cache line of its own,
so that neither ever waits for the other inside a call. Who has to wait, for bytes or for room, waits at its own bell:
all others ring that after they have changed something it may wait for. No ring is missed: who goes to sleep says so
before it looks at its bell for the last time, and who rings looks for sleepers after it has rung. In the same way a
writer that finds no room says so before it looks again, and the reader looks for that after it has made room.

What is written into an empty ring begins at its front: so messages that are shorter lie in one piece, and always in the
same cache lines.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hocket.kernels.arrays import copy
from hocket.kernels.jit import kernel
from hocket.kernels.memory.atomics import (
    compare_and_swap,
    fetch_add,
    load,
    monotonic_ns,
    pause,
    sched_yield,
    store,
)
from hocket.kernels.memory.bells import ring, sleep_until_rung

Words = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Bells = NDArray[np.int64]
"""Descriptors of pipes, one a rank: to read from for one's own, to write into for the others."""

LINE = 8  # words in 64 bytes
# Options, written once before the ranks meet
SIZE, SPIN_NS, CROWDED = range(3)
RANK_AREA = LINE
# Words of one rank, from its first one
BELL, ASLEEP, SCRATCH = 0, 1, 2
# Words of a ring, from its first one: of who writes, and in another line of who reads
WRITTEN, FULL, FRONT, TAKEN = 0, 1, 2, LINE  # FRONT: the count at the ring's front
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
def ring_bell(words: Words, bells: Bells, me: int, rank: int) -> None:
    """Rank `rank` has something to look at."""
    own = RANK_AREA + rank * LINE
    fetch_add(words, own + BELL, 1)
    if load(words, own + ASLEEP) and compare_and_swap(words, own + ASLEEP, 1, 0):  # of many who ring, one does
        ring(bells[rank], words, RANK_AREA + me * LINE + SCRATCH)


@kernel
def put(words: Words, rings: Bytes, bells: Bells, me: int, to: int, data: Bytes, done: int) -> int:
    """Write what there is room for of `data` behind its first `done` bytes; returns how many are done then.

    Who reads is told at once if it has a core to begin with them. Where it needs this one, it is the caller who tells,
    when there is no more to do here.
    """
    number = _ring_of(words[SIZE], me, to)
    at = _counts(words, number)
    while done < len(data):
        waiting = words[at + WRITTEN] - load(words, at + TAKEN)
        if waiting == 0:  # the reader looks at the front only after it has seen that something was written
            store(words, at + FRONT, words[at + WRITTEN])
        free = rings.shape[1] - waiting
        if free > 0:
            done += _move(words, at, WRITTEN, rings[number], free, data, done)
            if not words[CROWDED]:
                ring_bell(words, bells, me, to)
        elif not compare_and_swap(words, at + FULL, 0, 1):  # once that is said, look again
            break
    return done


@kernel
def take(words: Words, rings: Bytes, bells: Bells, me: int, source: int, out: Bytes, done: int) -> int:
    """Read what has come into `out`, behind its first `done` bytes; returns how many are done then."""
    number = _ring_of(words[SIZE], source, me)
    at = _counts(words, number)
    while done < len(out):
        come = load(words, at + WRITTEN) - words[at + TAKEN]
        if come == 0:
            break
        done += _move(words, at, TAKEN, rings[number], come, out, done)
        if load(words, at + FULL):
            store(words, at + FULL, 0)
            ring_bell(words, bells, me, source)
    return done


@kernel
def _move(words: Words, at: int, count: int, stream: Bytes, most: int, data: Bytes, done: int) -> int:
    """Move the next piece of `data` into or out of a ring, `most` bytes of it; returns how long it is."""
    begin = (words[at + count] - load(words, at + FRONT)) % len(stream)
    length = min(len(data) - done, most, len(stream) - begin, _PIECE)
    here, there = data[done : done + length], stream[begin : begin + length]
    if count == WRITTEN:
        copy(here, there)
    else:
        copy(there, here)
    fetch_add(words, at + count, length)  # before the caller looks who waits for it
    return length


@kernel
def next_source(words: Words, me: int, first: int) -> int:
    """The first rank from this one on, in a circle, of which there is something to take; -1 is none."""
    size = words[SIZE]
    for i in range(size):
        source = (first + i) % size
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
def await_bell(words: Words, bells: Bells, me: int, before: int, ns: int, idle: bool) -> int:
    """Wait until the bell has rung since it had rung `before` times, but no longer than `ns`.

    Who is `idle`, as a server between two requests, sleeps at once where others want its core: who has yielded queues
    for a core, behind whoever computes, while who sleeps is woken on that of the rank that waits for it.
    """
    own = RANK_AREA + me * LINE
    began = now = monotonic_ns()
    spin_ns = 0 if idle and words[CROWDED] else min(words[SPIN_NS], ns)
    while now - began < spin_ns:
        for _ in range(1 if words[CROWDED] else _PAUSES):
            if load(words, own + BELL) != before:
                return RUNG
            pause()
        sched_yield()  # who is to ring may wait for this very core
        now = monotonic_ns()
    outcome = LATE
    while outcome == LATE and now - began < ns:
        compare_and_swap(words, own + ASLEEP, 0, 1)
        if load(words, own + BELL) != before:
            outcome = RUNG
        elif sleep_until_rung(bells[me], min(began + ns - now, _NAP_NS), words, own + SCRATCH):
            outcome = INTERRUPTED
        now = monotonic_ns()
    store(words, own + ASLEEP, 0)
    return outcome
