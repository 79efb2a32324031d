"""Collectives through memory: what a library would give, bit for bit the same on every rank and every time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from leftovers import segments, vanish
from tiny import on_threads
from torch import Tensor

from hocket.core.comm import Comm, Op, Rank
from hocket.core.errors import CommError, DeadlineExceeded, RankFailed
from hocket.engines.commons import row_bytes
from hocket.engines.one_host import Hosts, OneHost, by_host

TYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
)  # fmt: skip
HALVES = (torch.float16, torch.bfloat16)
ROW = row_bytes(8)
LENGTHS = st.one_of(
    st.integers(0, 70),
    st.sampled_from([1023, 2048, 2049, 8193]),
    st.sampled_from([ROW // 4 - 1, ROW // 4 + 1, 2 * ROW // 4 + 5]),
)


def joined(rank: Rank, host: int = 0, deadline_s: float = 20.0) -> Comm:
    return by_host(rank.comm, deadline_s, lambda x: False, host=host)


def values(dtype: torch.dtype, length: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(length, generator=g).to(dtype)
    return torch.randint(0, 100, (length,), generator=g).to(dtype)


def summed(comm: Comm, x: Tensor, op: Op) -> Tensor:
    """What the ranks' own library makes of it; half floats are rounded once."""
    wide = x.float() if x.dtype in HALVES else x.clone()
    comm.all_reduce(wide, op)
    return wide.to(x.dtype)


def alike(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


@settings(max_examples=25)
@given(
    size=st.integers(1, 8),
    dtype=st.sampled_from(TYPES),
    length=LENGTHS,
    op=st.sampled_from(["sum", "max", "min"]),
    root=st.integers(0, 7),
    late=st.lists(st.sampled_from([0.0, 0.0, 0.0005, 0.004]), min_size=8, max_size=8),
)
def test_every_collective_gives_what_the_library_gives(
    size: int, dtype: torch.dtype, length: int, op: Op, root: int, late: list[float]
) -> None:
    def main(rank: Rank) -> None:
        library, memory = rank.comm, joined(rank)
        x = values(dtype, length, rank.comm.rank)
        pieces = values(dtype, length * size, 100 + rank.comm.rank)
        time.sleep(late[rank.comm.rank])
        mine = x.clone()
        memory.all_reduce(mine, op)
        assert alike(mine, summed(library, x, op))

        everyone, wanted = x.new_zeros(length * size), x.new_zeros(length * size)
        memory.all_gather(everyone, x)
        library.all_gather(wanted, x)
        assert alike(everyone, wanted)

        part = x.new_zeros(length)
        time.sleep(late[-1 - rank.comm.rank])
        memory.reduce_scatter(part, pieces, op)
        begin = rank.comm.rank * length
        assert alike(part, summed(library, pieces, op)[begin : begin + length])

        memory.barrier()
        mine = x.clone()
        memory.broadcast(mine, root % size)
        assert alike(mine, values(dtype, length, root % size))

    on_threads(main, size)


def test_a_sum_is_repeatable_and_the_same_on_all_ranks() -> None:
    def main(rank: Rank) -> list[list[float]]:
        memory = joined(rank)
        found = []
        for turn in range(3):
            time.sleep(0.002 * ((rank.comm.rank + turn) % 3))
            x = values(torch.float32, 5000, rank.comm.rank) * 10.0 ** (3 * rank.comm.rank)
            memory.all_reduce(x)
            found.append(x.tolist())
        return found

    results = on_threads(main, 3)
    assert all(turn == results[0][0] for turns in results for turn in turns)


def test_a_mean_divides_and_nan_is_seen_by_all() -> None:
    def main(rank: Rank) -> list[float]:
        memory = joined(rank)
        x = torch.tensor([float(rank.comm.rank), 3.0])
        memory.all_reduce(x, "mean")
        seen = torch.tensor([float("nan") if rank.comm.rank == 1 else 1.0])
        memory.all_reduce(seen, "max")
        assert seen.isnan()
        whole = torch.tensor([True, rank.comm.rank == 0])  # no type of sums: the library sees to it
        memory.all_reduce(whole, "max")
        assert whole.tolist() == [True, True]
        return x.tolist()

    assert on_threads(main, 3) == [[1.0, 3.0]] * 3


def test_what_does_not_lie_in_one_piece_or_needs_a_gradient() -> None:
    def main(rank: Rank) -> None:
        memory = joined(rank)
        table = torch.full((4, 2), float(rank.comm.rank))
        memory.all_reduce(table[:, 0])
        assert table.tolist() == [[1.0, float(rank.comm.rank)]] * 4
        weights = torch.ones(3, requires_grad=True)
        memory.all_reduce(weights)
        assert weights.tolist() == [2.0] * 3

    on_threads(main, 2)


def test_tensors_have_any_shape() -> None:
    def main(rank: Rank) -> None:
        memory, me = joined(rank), rank.comm.rank
        x, number = torch.full((2, 3), float(me)), torch.tensor(float(me))
        memory.all_reduce(x)
        memory.all_reduce(number, "max")
        assert x.tolist() == [[3.0] * 3] * 2 and number == 2
        out, rows = torch.zeros(1, 2), torch.full((3, 2), float(me + 1))
        memory.reduce_scatter(out, rows)
        assert out.tolist() == [[6.0, 6.0]]
        memory.all_gather(rows, torch.full((1, 2), float(me)))
        assert rows.tolist() == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
        memory.broadcast(x.fill_(me), 1)
        assert x.tolist() == [[1.0] * 3] * 2

    on_threads(main, 3)


def test_parts_that_are_split_off_meet_by_themselves() -> None:
    def main(rank: Rank) -> float:
        memory = joined(rank)
        part = memory.split(rank.comm.rank % 2, key=-rank.comm.rank)
        assert isinstance(part, OneHost)
        x = torch.tensor([float(rank.comm.rank)])
        for _ in range(1 + rank.comm.rank % 2):  # one part meets more often than the other
            part.all_reduce(x)
        root = torch.tensor([part.rank])
        part.broadcast(root, 1)
        assert int(root) == 1
        memory.barrier()
        return float(x)

    assert on_threads(main, 5) == [6.0, 8.0, 6.0, 8.0, 6.0]


def test_native_is_the_library() -> None:
    def main(rank: Rank) -> None:
        memory = joined(rank)
        assert memory.native is rank.comm

    on_threads(main, 2)


@pytest.mark.parametrize("hosts", [(0, 0, 1), (0, 1, 0, 1, 1), (2, 1, 1, 0, 2)])
def test_between_hosts_one_rank_of_each_speaks(hosts: tuple[int, ...]) -> None:
    """Sums of whole numbers, whose order does not matter."""

    def main(rank: Rank) -> None:
        me, size = rank.comm.rank, rank.comm.size
        memory = joined(rank, hosts[me])
        assert isinstance(memory, Hosts)
        x = torch.arange(1000.0) + me
        memory.all_reduce(x)
        assert torch.equal(x, torch.arange(1000.0) * size + sum(range(size)))
        mean = torch.tensor([float(me)])
        memory.all_reduce(mean, "mean")
        assert float(mean) == (size - 1) / 2
        for root in range(size):
            got = torch.tensor([float(me)])
            memory.broadcast(got, root)
            assert float(got) == root
        memory.barrier()
        everyone = torch.zeros(size)
        memory.all_gather(everyone, torch.tensor([float(me)]))
        assert everyone.tolist() == list(range(size))
        part = memory.split(int(me > 0))
        count = torch.ones(1)
        part.all_reduce(count)
        assert float(count) == (1 if me == 0 else size - 1)

    on_threads(main, len(hosts))


def test_one_rank_a_host_is_the_library_itself() -> None:
    def main(rank: Rank) -> None:
        assert joined(rank, rank.comm.rank) is rank.comm

    on_threads(main, 3)


def failure(main: Callable[[Rank], Any], size: int) -> RankFailed:
    with pytest.raises(RankFailed) as caught:
        on_threads(main, size)
    return caught.value


def test_who_does_not_come_is_named_at_the_deadline() -> None:
    left = threading.Event()

    def main(rank: Rank) -> None:
        memory = joined(rank, deadline_s=1.0)
        memory.barrier()
        if rank.comm.rank == 1:
            assert left.wait(20)
            return
        try:
            memory.all_reduce(torch.ones(3))
        except DeadlineExceeded as error:
            assert error.peers == "rank 1"
            assert "waited 1.0 s in all_reduce for rank 1" in str(error)
        else:
            raise AssertionError("it did not wait")
        finally:
            left.set()

    on_threads(main, 3)


def test_ranks_that_do_different_things_are_told_so() -> None:
    def main(rank: Rank) -> None:
        memory = joined(rank)
        if rank.comm.rank == 0:
            memory.all_reduce(torch.ones(3))
        else:
            memory.all_reduce(torch.ones(4, dtype=torch.float64))

    failed = failure(main, 2)
    assert CommError.__name__ in failed.reason
    assert "all_reduce of 3 float32" in failed.reason and "all_reduce of 4 float64" in failed.reason


def test_nothing_is_left_in_dev_shm() -> None:
    def main(rank: Rank) -> set[Path]:
        before = segments()
        memory = joined(rank)
        memory.barrier()
        made = segments() - before
        memory.barrier()
        return made

    assert vanish(on_threads(main, 2)[0])
