"""Messages between ranks of one host, through memory that all of them have mapped."""

from __future__ import annotations

import os
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from hocket.core.comm import ANY, Comm, Deferred, Request, receiving, sender
from hocket.core.errors import DeadlineExceeded, NothingCame
from hocket.core.message import Message
from hocket.engines.commons import BUSY_NS, FIRST_NS, LAST_NS, Patience
from hocket.kernels.jit import one_compiles
from hocket.kernels.memory import rings as kernels
from hocket.kernels.memory.block import Block

MOST_RANKS = 64
"""Among more, the rings would be too short: their number grows as the square."""
_RINGS_BYTES, _LONGEST_RING, _PAGE = 128 << 20, 1 << 20, 4096
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_SPIN_S, _CROWDED_S = 2e-3, 2e-5
"""How long a rank that waits keeps its core busy before it sleeps, and where others want that core."""

_CROWDED_FIRST_NS = 2_000_000
"""How long it waits before it helps the library along: to wake up may take the core from who is waited for."""

Words = NDArray[np.int64]
Bytes = NDArray[np.uint8]
T = TypeVar("T")


def ring_bytes(size: int, room: int = _RINGS_BYTES) -> int:
    """Of each ring among so many ranks. A message may be longer: it then goes in pieces."""
    return max(min(min(room, _RINGS_BYTES) // kernels.rings_for(size), _LONGEST_RING) // _PAGE, 1) * _PAGE


def nbytes(size: int, room: int = _RINGS_BYTES) -> int:
    """Of the block that so many ranks need, where there is so much room for it."""
    return 8 * _words(size) + kernels.rings_for(size) * ring_bytes(size, room)


def _words(size: int) -> int:
    return -(-kernels.words_for(size) // 512) * 512  # rings begin with a page


def lay_out(block: Block, size: int, patience: Patience) -> None:
    """Make a new block ready, before any rank sees it."""
    control: Words = np.frombuffer(block.memory, np.int64, _words(size))
    control[kernels.SIZE] = size
    control[kernels.CROWDED] = patience.crowded
    control[kernels.SPIN_NS] = round((_CROWDED_S if patience.crowded else _SPIN_S) * 1e9)


def load_kernels() -> None:
    """Compile what messages call, or load it from the cache: before anybody waits for us."""
    block, patience, pipes = Block.anonymous(nbytes(2)), Patience(1.0, crowded=False), [os.pipe2(_FLAGS) for _ in "ab"]
    lay_out(block, 2, patience)
    one, other = (Post(block, [pipes[0][rank], pipes[1][1 - rank]], 2, rank, patience) for rank in range(2))
    with one_compiles():
        one.isend(1, Message())
        other.recv(0)
        with suppress(TimeoutError):
            other.recv(0, timeout=1e-6)


def pipes_of_all(comm: Comm) -> list[int] | None:
    """A pipe for each rank: the end to read from for one's own, the end to write into for the others, and at last one's
    own again, so that it is never without a writer. None where ranks cannot reach each other's.

    They have no name, so that nothing is left behind: one opens another's by way of the process that has it.
    """
    own, end = os.pipe2(_FLAGS)
    found = torch.zeros(2 * comm.size, dtype=torch.int64)
    comm.all_gather(found, torch.tensor([os.getpid(), end]))
    opened = []
    with suppress(OSError):
        for rank, (process, descriptor) in enumerate(found.view(-1, 2).tolist()):
            path = f"/proc/{process}/fd/{descriptor}"
            opened.append(own if rank == comm.rank else os.open(path, os.O_WRONLY | _FLAGS))
    opened.append(end)
    all_are_open = torch.tensor([int(len(opened) > comm.size)])
    comm.all_reduce(all_are_open, "min")  # and so nobody leaves before
    if all_are_open:
        return opened
    _close({own, *opened})
    return None


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


_FRAME = struct.Struct("<qq")
"""What comes before a message: its length and its tag."""


class _Outbox:
    """What has not left yet because a ring was full."""

    def __init__(self, control: Words, rings: Bytes, bells: Words, rank: int, size: int) -> None:
        self._control, self._rings, self._bells, self._rank = control, rings, bells, rank
        self._waiting: dict[int, deque[Bytes]] = {}
        """By the rank that it is for; none is empty."""
        self._written = [0] * size
        """Of the first that waits: so many bytes are in the ring."""
        self._left = [0] * size
        """How many pieces have wholly left."""

    def add(self, to: int, pieces: list[Bytes]) -> Callable[[], bool]:
        """What is returned tells whether they have left. They may be changed now: what has to wait is copied."""
        waiting = self._waiting.setdefault(to, deque())
        number = self._left[to] + len(waiting) + len(pieces)
        waiting += pieces
        self._push(to)
        for i in range(max(len(waiting) - len(pieces), 0), len(waiting)):
            waiting[i] = waiting[i].copy()
        return lambda: self._left[to] >= number

    def push(self) -> bool:
        """Write what there is room for. True while something has not left."""
        for to in list(self._waiting):
            self._push(to)
        return bool(self._waiting)

    def _push(self, to: int) -> None:
        waiting, words, bells, me = self._waiting[to], self._control, self._bells, self._rank
        while waiting:
            done = kernels.put(words, self._rings, bells, me, to, waiting[0], self._written[to])
            if done < len(waiting[0]):
                self._written[to] = done
                break
            waiting.popleft()
            self._written[to] = 0
            self._left[to] += 1
        kernels.ring_bell(words, bells, me, to)
        if not waiting:
            del self._waiting[to]

    def close(self, within_s: float) -> None:
        """Before the rank leaves: nobody else could send the rest."""
        until = time.monotonic() + within_s
        while self.push() and time.monotonic() < until:
            time.sleep(1e-4)
        _close(self._bells.tolist())


class _Arriving:
    """The part of a stream that is being read: a frame, or the message that it announced."""

    def __init__(self) -> None:
        self.frame: Bytes = np.empty(_FRAME.size, np.uint8)
        self.target, self.done, self.tag = self.frame, 0, 0


class Post:
    """One rank's messages to and from the others. Nothing moves outside of its calls: who computes after it has sent
    a message that is longer than a ring keeps the rest of it."""

    def __init__(self, block: Block, pipes: list[int], size: int, rank: int, patience: Patience) -> None:
        self._block, self._size, self._rank, self._patience = block, size, rank, patience
        self._control: Words = np.frombuffer(block.memory, np.int64, _words(size))
        flat: Bytes = np.frombuffer(block.memory, np.uint8, offset=8 * _words(size))
        self._rings = flat.reshape(kernels.rings_for(size), -1)
        self._first_ns = _CROWDED_FIRST_NS if patience.crowded else FIRST_NS
        self._bells: Words = np.array(pipes, np.int64)
        self._outbox = _Outbox(self._control, self._rings, self._bells, rank, size)
        self._arriving = [_Arriving() for _ in range(size)]
        self._turn = 0
        """Whose messages are looked for first: so all are taken from in turn."""
        self._come: list[tuple[int, int, Message]] = []
        """Source, tag and message, in the order in which they were complete."""
        weakref.finalize(self, self._outbox.close, patience.deadline_s)

    def isend(self, to: int, msg: Message, tag: int = 0) -> Request:
        pieces = msg.pieces()
        frame = np.array([sum(map(len, pieces)), tag], np.int64).view(np.uint8)
        has_left = self._outbox.add(to, [frame, *pieces])

        def finish() -> None:
            if self._await(lambda: has_left() or None) is None:
                raise DeadlineExceeded(self._rank, f"send(to={to})", f"rank {to}", self._patience.deadline_s)

        return Deferred(finish)

    def recv(self, source: int = ANY, tag: int = 0, timeout: float | None = None) -> tuple[int, Message]:
        def found() -> tuple[int, Message] | None:
            for i, (origin, its_tag, msg) in enumerate(self._come):
                if source in (ANY, origin) and tag == its_tag:
                    del self._come[i]
                    return origin, msg
            return None

        received = self._await(found, timeout, idle=source == ANY)
        if received is not None:
            return received
        name = receiving(source, tag)
        if timeout is None:
            raise DeadlineExceeded(self._rank, name, sender(source), self._patience.deadline_s)
        raise NothingCame(self._rank, timeout, name)

    def _await(self, found: Callable[[], T | None], timeout: float | None = None, *, idle: bool = False) -> T | None:
        """Let messages come and go until `found` answers; None at the end of a `timeout`, or else at the deadline.

        No more is taken than that needs: what waits in a ring is in nobody's cache for nothing.
        """
        began, limit_s = time.monotonic(), self._patience.deadline_s if timeout is None else timeout
        help_along, slice_ns = self._patience.help_along, self._first_ns
        while True:
            before = kernels.heard(self._control, self._rank)
            self._outbox.push()
            while (answer := found()) is None and self._take():
                pass
            if answer is not None:
                return answer
            left_s = limit_s - (time.monotonic() - began)
            if left_s <= 0:
                return None
            longest_ns = round(left_s * 1e9)
            if help_along is not None:
                longest_ns = min(longest_ns, slice_ns)
            outcome = kernels.await_bell(self._control, self._bells, self._rank, before, longest_ns, idle)
            if outcome != kernels.RUNG and help_along is not None:
                slice_ns = BUSY_NS if help_along() else min(2 * max(slice_ns, self._first_ns), LAST_NS)

    def move(self) -> bool:
        """Take what has come, and write what there is room for. True while something of ours has not left."""
        while self._take():
            pass
        return self._outbox.push()

    def _take(self) -> bool:
        """Take a message, or what has come of it, from the next rank of which there is something."""
        source = kernels.next_source(self._control, self._rank, self._turn)
        if source < 0:
            return False
        self._turn, part = source + 1, self._arriving[source]
        while self._has_come(source, part):
            if part.target is part.frame:
                length, part.tag = _FRAME.unpack(part.frame)
                part.target = np.empty(length, np.uint8)
            else:
                self._come.append((source, part.tag, Message.unpack(part.target)))
                part.target = part.frame
                break
        return True

    def _has_come(self, source: int, part: _Arriving) -> bool:
        """Whether all of a part has; it then begins anew."""
        part.done = kernels.take(self._control, self._rings, self._bells, self._rank, source, part.target, part.done)
        if part.done < len(part.target):
            return False
        part.done = 0
        return True
