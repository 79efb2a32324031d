"""Messages through memory: whole, in order, never lost, whoever waits and however long they are."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import on_threads

from hocket.core.comm import ANY, Rank
from hocket.core.errors import DeadlineExceeded
from hocket.core.message import Message
from hocket.engines import one_host, post
from hocket.engines.commons import Patience
from hocket.engines.one_host import OneHost
from hocket.engines.post import MOST_RANKS, Post, nbytes, ring_bytes
from hocket.kernels.memory import rings as kernels
from hocket.kernels.memory.block import Block
from hocket.kernels.memory.tally import Tally

RING = ring_bytes(3) // 4
"""Floats that fill a ring of three ranks."""
LENGTHS = st.sampled_from([0, 1, 7, 1000, RING - 20, RING, 3 * RING + 1])


def joined(rank: Rank, deadline_s: float = 20.0, crowded: bool = False) -> OneHost:
    return OneHost(rank.comm, Patience(deadline_s, crowded), lambda x: False)


def letter(sender: int, tag: int, number: int, length: int) -> Message:
    return Message("letter", (sender, tag, number), (torch.arange(float(length)) + sender,))


@settings(max_examples=15)
@given(
    sent=st.lists(st.tuples(st.integers(0, 1), LENGTHS), min_size=1, max_size=6),
    crowded=st.booleans(),
    late=st.lists(st.sampled_from([0.0, 0.0005, 0.004]), min_size=3, max_size=3),
)
def test_messages_arrive_whole_and_in_the_order_of_their_tag(
    sent: list[tuple[int, int]], crowded: bool, late: list[float]
) -> None:
    """All send everything to all before anybody receives; then those of the second tag are taken first."""

    def main(rank: Rank) -> None:
        comm, me = joined(rank, crowded=crowded), rank.comm.rank
        others = [r for r in range(3) if r != me]
        time.sleep(late[me])
        for to, (number, (tag, length)) in product(others, enumerate(sent)):
            comm.isend(to, letter(me, tag, number, length), tag)
        for tag, source in product((1, 0), others):
            for number, (_, length) in [(n, s) for n, s in enumerate(sent) if s[0] == tag]:
                sender, found = comm.recv(source, tag)
                assert sender == source and found.kind == "letter" and found.ints == (source, tag, number)
                assert torch.equal(found.tensors[0], torch.arange(float(length)) + source)
        with pytest.raises(TimeoutError):
            comm.recv(ANY, 0, timeout=0)

    on_threads(main, 3)


@contextmanager
def posts_of(size: int) -> Iterator[list[Post]]:
    """Of ranks that are all here, so that what each does is known."""
    block, patience = Block.anonymous(nbytes(size)), Patience(20.0, crowded=False)
    post.lay_out(block, size, patience)
    pipes = [os.pipe2(os.O_NONBLOCK) for _ in range(size)]
    ends = [[os.dup(pipes[r][0 if r == me else 1]) for r in range(size)] for me in range(size)]
    yield [Post(block, ends[me], size, me, patience) for me in range(size)]
    for descriptor in chain(*pipes):
        os.close(descriptor)


def test_messages_that_come_one_by_one_lie_in_one_place_of_the_ring() -> None:
    with posts_of(2) as (one, other):
        for number in range(5):
            one.isend(1, letter(0, 0, number, 1000))
            assert other.recv(0)[1].ints[2] == number
            other.isend(0, letter(1, 0, number, 1000))
            assert one.recv(1)[1].ints[2] == number
        assert not one._rings[:, 4200:].any()


def test_who_wants_one_message_takes_one_and_the_next_from_another() -> None:
    with posts_of(3) as (*writers, reader):
        for number, writer in product(range(3), writers):
            writer.isend(2, letter(writer._rank, 0, number, 7))
        assert [reader.recv()[1].ints for _ in range(2)] == [(0, 0, 0), (1, 0, 0)]
        assert kernels.next_source(reader._control, 2, 0) == 0 and kernels.next_source(reader._control, 2, 1) == 1
        assert [reader.recv()[1].ints for _ in range(4)] == [(0, 0, 1), (1, 0, 1), (0, 0, 2), (1, 0, 2)]
        assert kernels.next_source(reader._control, 2, 0) == -1


@pytest.mark.parametrize("crowded", [False, True])
def test_no_wake_up_is_missed(crowded: bool) -> None:
    """Two ranks that answer each other, with waits before and after the other has gone to sleep."""

    def main(rank: Rank) -> int:
        comm, other = joined(rank, crowded=crowded), 1 - rank.comm.rank
        for number in range(1500):
            if rank.comm.rank == number % 2:
                comm.isend(other, Message("", (number,)))
            else:
                assert comm.recv(other)[1].ints == (number,)
            if number % 300 == 0:
                time.sleep(0.003)
        return number

    assert on_threads(main, 2) == [1499, 1499]


def test_who_waits_in_a_collective_still_sends() -> None:
    """Rank 1 comes to the barrier only after it has the whole of a message that is longer than a ring."""

    def main(rank: Rank) -> float:
        comm, total = joined(rank), 0.0
        if rank.comm.rank == 0:
            comm.isend(1, letter(0, 0, 0, 5 * RING))
        elif rank.comm.rank == 1:
            total = float(comm.recv(0)[1].tensors[0][-1])
        comm.barrier()
        return total

    assert on_threads(main, 3)[1] == 5 * RING - 1


def test_who_leaves_sends_the_rest_first() -> None:
    def main(rank: Rank) -> int:
        comm = joined(rank)
        if rank.comm.rank == 1:
            time.sleep(0.05)
            return comm.recv(0)[1].tensors[0].numel()
        comm.isend(1, letter(0, 0, 0, 5 * RING))
        del comm
        gc.collect()
        return 0

    assert on_threads(main, 2) == [0, 5 * RING]


def test_a_send_is_over_when_the_message_has_left() -> None:
    """Two ranks that each wait for that let the other's come in meanwhile."""

    def main(rank: Rank) -> int:
        comm, other = joined(rank), 1 - rank.comm.rank
        comm.send(other, letter(rank.comm.rank, 0, 0, 4 * RING))
        return comm.recv(other)[1].tensors[0].numel()

    assert on_threads(main, 2) == [4 * RING] * 2


def test_who_waits_in_vain_is_told_for_whom() -> None:
    def main(rank: Rank) -> str:
        comm = joined(rank, deadline_s=0.2)
        text = ""
        if rank.comm.rank == 0:
            with pytest.raises(DeadlineExceeded) as caught:
                comm.recv(2, tag=4)
            text = str(caught.value)
            with pytest.raises(DeadlineExceeded, match="send"):
                comm.send(1, letter(0, 0, 0, 9 * RING))
        rank.comm.barrier()
        return text

    told = on_threads(main, 3)[0]
    assert "recv(source=2, tag=4)" in told and "rank 2" in told


def test_more_ranks_than_rings_are_for_speak_through_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nbytes(MOST_RANKS) < 136 << 20 and ring_bytes(MOST_RANKS) >= 4096
    assert ring_bytes(16) > 500_000, "a perceptron's gradient in one piece, however many push"
    monkeypatch.setattr(post, "MOST_RANKS", 2)
    monkeypatch.setattr(post, "Post", None)  # nobody makes one

    def main(rank: Rank) -> int:
        comm = joined(rank)
        comm.isend((rank.comm.rank + 1) % 3, Message("", (rank.comm.rank,)))
        return comm.recv()[1].ints[0]

    assert on_threads(main, 3) == [2, 0, 1]


def test_who_is_not_waited_for_is_left_in_peace() -> None:
    """A rank that waits for an answer sleeps on while what it has sent is read: there was room for all of it."""

    def main(rank: Rank) -> int:
        comm, me = joined(rank, crowded=True), rank.comm.rank
        assert comm._post is not None
        control = comm._post._control
        comm.barrier()
        before = int(kernels.heard(control, 0))
        if me == 0:
            comm.isend(1, letter(0, 0, 0, RING // 2))
        else:
            comm.recv(0)
        comm.barrier()
        return int(kernels.heard(control, 0)) - before

    assert on_threads(main, 2) == [0, 0]


def test_where_there_is_little_room_messages_and_collectives_go_in_smaller_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(one_host, "room", lambda: 300_000)

    def main(rank: Rank) -> tuple[int, float]:
        comm, me = joined(rank), rank.comm.rank
        assert comm._post is not None and comm._post._rings.nbytes <= 300_000
        x = torch.full((200_000,), float(me + 1))
        comm.all_reduce(x)
        comm.isend((me + 1) % 3, letter(me, 0, 0, RING))
        assert bool((x == 6).all())
        return comm.recv()[1].tensors[0].numel(), float(x[-1])

    assert on_threads(main, 3) == [(RING, 6.0)] * 3


def test_ranks_that_cannot_reach_the_others_pipes_speak_through_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: str, *_: object) -> int:
        raise PermissionError(path)

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(post.os, "open", refused)
        patched.setattr(post, "Post", None)  # nobody makes one

        def main(rank: Rank) -> int:
            pipes = post.pipes_of_all(rank.comm)
            assert pipes is None
            return 0

        on_threads(main, 2)
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_wakes_the_others_is_closed_in_the_end() -> None:
    def main(rank: Rank) -> None:
        comm = joined(rank)
        comm.isend(1 - rank.comm.rank, Message())
        comm.recv()

    on_threads(main, 2)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    on_threads(main, 2)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_ranks_of_one_host_count_up_without_asking_each_other() -> None:
    def main(rank: Rank) -> list[int]:
        counter = joined(rank).counter(2)
        assert isinstance(counter, Tally)
        return [counter.take(number=1) for _ in range(500)]

    taken = on_threads(main, 3)
    assert sorted(chain(*taken)) == list(range(1500))
