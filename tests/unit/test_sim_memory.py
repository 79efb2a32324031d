"""Shared memory in virtual time: who waits for whom, what is lost, and what is stale."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_args

import pytest
import torch
from tiny import on_sim

from hocket.core.comm import Rank
from hocket.core.errors import RankFailed
from hocket.core.sharing import Backoff, Method, Sharing, Statistics
from hocket.core.staleness import Handling

METHODS = get_args(Method)
LOCKS = ("mutex", "rwlock")
EXACT = ("mutex", "rwlock", "leashed")
DIM = 10
PASS_S = DIM * 4 * 1e-3
"""One pass over the vector, at a kilobyte a second."""
SLOW = dict(compute="1s", memory="1KB")


def share(rank: Rank, method: Any = "mutex", dim: int = DIM, **options: Any) -> Any:
    return rank.comm.share(Sharing(method, dim, rank.comm.size, **options), torch.zeros(dim))


class TestLock:
    """Each rank comes at a time, takes the lock, holds it for a while."""

    def held(self, visits: list[tuple[float, float, bool]], **options: Any) -> list[tuple[float, float, float]]:
        """For each rank's visit (when it comes, how long it holds, whether alone): from when to when it held the
        lock, and the wait that it was told."""

        def main(rank: Rank) -> tuple[float, float, float]:
            lock = share(rank, "rwlock", **options).memory.lock
            comes, holds, alone = visits[rank.comm.rank]
            rank.clock.charge(comes)
            waited = lock.take(rank.comm.rank, exclusive=alone)
            began = rank.clock.now()
            rank.clock.charge(holds)
            lock.drop(rank.comm.rank)
            return began, rank.clock.now(), waited

        return on_sim(main, len(visits), compute="1s")

    def test_it_is_granted_in_the_order_of_asking(self) -> None:
        """Rank 2 comes before rank 1."""
        found = self.held([(0, 10, True), (3, 2, True), (1, 4, True), (5, 1, True)])
        assert found == [(0, 10, 0), (14, 16, 11), (10, 14, 9), (16, 17, 11)]

    def test_who_comes_when_it_is_free_does_not_wait(self) -> None:
        assert self.held([(0, 1, True), (1, 1, True), (7, 1, True)]) == [(0, 1, 0), (1, 2, 0), (7, 8, 0)]

    def test_readers_hold_it_together(self) -> None:
        found = self.held([(0, 5, False), (1, 5, False), (2, 5, False)])
        assert found == [(0, 5, 0), (1, 6, 0), (2, 7, 0)]

    def test_a_writer_waits_for_the_last_reader(self) -> None:
        found = self.held([(0, 9, False), (1, 2, False), (2, 1, True)])
        assert found[2] == (9, 10, 7)

    def test_readers_wait_for_a_writer_and_then_go_in_together(self) -> None:
        found = self.held([(0, 5, True), (1, 3, False), (2, 4, False)])
        assert found == [(0, 5, 0), (5, 8, 4), (5, 9, 3)]

    def test_a_reader_does_not_overtake_a_waiting_writer(self) -> None:
        """Or readers who come and go would keep it out for ever."""
        found = self.held([(0, 5, False), (1, 2, True), (2, 1, False)])
        assert found == [(0, 5, 0), (5, 7, 4), (7, 8, 5)]

    @pytest.mark.parametrize("ties", [0, 1, 2])
    @pytest.mark.parametrize("backoff", get_args(Backoff))
    def test_writers_are_alone_however_they_wait(self, backoff: str, ties: int) -> None:
        def main(rank: Rank) -> list[tuple[float, float, bool]]:
            me = rank.comm.rank
            lock = share(rank, "rwlock", backoff=backoff, backoff_s=5e-6, backoff_max_s=4e-5).memory.lock
            visits = []
            for k in range(6):
                rank.clock.charge((me * 7 + k * 3) % 5 / 10)
                alone = (me + k) % 3 == 0
                lock.take(me, exclusive=alone)
                began = rank.clock.now()
                rank.clock.charge(0.2)
                lock.drop(me)
                visits.append((began, rank.clock.now(), alone))
            return visits

        found = on_sim(main, 5, compute="100us", ties=ties)
        visits = sorted(visit for one in found for visit in one)
        assert len(visits) == 30
        together = 0
        for i, (began, ended, alone) in enumerate(visits):
            for other_began, other_ended, other_alone in visits[i + 1 :]:
                if other_began < ended - 1e-12 and began < other_ended - 1e-12:
                    assert not alone and not other_alone, f"{began} to {ended}, {other_began} to {other_ended}"
                    together += 1
        assert together, "readers never met, so this shows nothing"

    @pytest.mark.parametrize(
        ("backoff", "longest"), [("constant", 0.25), ("yield", 1e-6), ("exponential", 0.5), ("none", 0.0)]
    )
    def test_a_backoff_comes_late_by_one_wait_at_most(self, backoff: str, longest: float) -> None:
        options = dict(backoff=backoff, backoff_s=0.25, backoff_max_s=0.5)
        held_s = 0.001 if backoff == "yield" else 1.1
        (_, free, _), (began, _, waited) = self.held([(0, held_s, True), (held_s / 100, 1, True)], **options)
        assert free <= began <= free + longest + 1e-9
        assert waited == pytest.approx(began - held_s / 100)
        if backoff == "constant":
            assert waited == pytest.approx(1.25)

    def test_a_lock_that_is_never_dropped_is_a_deadlock_with_names(self) -> None:
        def main(rank: Rank) -> None:
            lock = share(rank).memory.lock
            rank.clock.charge(rank.comm.rank)
            lock.take(rank.comm.rank, exclusive=True)

        with pytest.raises(RankFailed, match="rank 1 waits for rank 0 in lock of the mutex"):
            on_sim(main, 2, compute="1s")


@dataclasses.dataclass
class Counted:
    """What a canary saw: each update adds 1 everywhere."""

    torn: int
    total: torch.Tensor
    statistics: Statistics
    applied: int


def count(method: str, workers: int = 8, updates: int = 20, dim: int = 64, block: int = 4, **options: Any) -> Counted:
    """Workers that differ in speed, so that they come to meet in all kinds of ways."""

    def main(rank: Rank) -> tuple[int, int, torch.Tensor, Statistics]:
        shared = share(rank, method, dim, **options)
        x, torn, applied = torch.empty(dim), 0, 0
        for k in range(updates):
            shared.read(x)
            torn += bool((x != x[0]).any())
            rank.clock.charge(1 + (rank.comm.rank * 5 + k * 3) % 7 / 7)
            applied += shared.publish(torch.full((dim,), -1.0), 1.0)
        rank.comm.barrier()
        shared.read(x)
        return torn, applied, x.clone(), shared.statistics()

    found = on_sim(main, workers, compute="10us", memory="80MB", block=block)
    assert all(torch.equal(x, found[0][2]) for _, _, x, _ in found)
    return Counted(sum(f[0] for f in found), found[0][2], found[0][3], sum(f[1] for f in found))


class TestCanary:
    @pytest.mark.parametrize("backoff", get_args(Backoff))
    @pytest.mark.parametrize("method", EXACT)
    def test_nothing_is_torn_or_lost(self, method: str, backoff: str) -> None:
        found = count(method, backoff=backoff, backoff_s=1e-6, backoff_max_s=2e-5)
        assert found.torn == 0
        assert found.total.tolist() == [160.0] * 64
        statistics = found.statistics
        assert statistics.updates == found.applied == statistics.staleness.total() == 160
        assert statistics.dropped == 0
        if method == "leashed":
            assert statistics.tries.total() == 160 > statistics.tries[0], "they met"
            assert statistics.lock_wait_s > 0, "what a failed attempt costs is a wait too"
            assert 8 + 2 < statistics.peak_vectors <= 3 * 8 + 1
        else:
            assert statistics.lock_wait_s > 0, "they met"
            assert not statistics.tries
            assert statistics.peak_vectors == 1 + 2 * 8

    def test_hogwild_tears_and_loses(self) -> None:
        found = count("hogwild")
        assert found.torn > 0
        assert 160 / 8 < found.total.min() < 160
        assert found.total.max() <= 160
        assert found.statistics.updates == found.statistics.staleness.total() == 160
        assert found.statistics.lock_wait_s == 0
        assert found.statistics.peak_vectors == 1 + 8

    def test_hogwild_alone_loses_nothing(self) -> None:
        found = count("hogwild", workers=1)
        assert found.torn == 0 and found.total.tolist() == [20.0] * 64

    def test_hogwild_loses_whole_updates_or_none_where_a_block_is_the_vector(self) -> None:
        found = count("hogwild", block=64)
        assert found.torn == 0
        assert (found.total == found.total[0]).all() and found.total[0] < 160

    def test_what_was_dropped_was_not_applied(self) -> None:
        found = count("leashed", persistence=0)
        statistics = found.statistics
        assert statistics.dropped > 0
        assert statistics.updates + statistics.dropped == 160
        assert found.total.tolist() == [float(statistics.updates)] * 64 == [float(found.applied)] * 64
        assert statistics.staleness.total() == statistics.updates
        assert statistics.tries == {0: statistics.updates, 1: statistics.dropped}

    def test_more_persistence_drops_less(self) -> None:
        dropped = [count("leashed", persistence=k).statistics.dropped for k in (0, 1, 2)]
        assert dropped[0] > dropped[1] > dropped[2]
        assert count("leashed", persistence=None).statistics.dropped == 0

    def test_no_update_fails_more_often_than_its_persistence_allows(self) -> None:
        tries = count("leashed", persistence=2).statistics.tries
        assert max(tries) == 3, "the third failure drops it"


class TestStaleness:
    @pytest.mark.parametrize("method", METHODS)
    def test_it_is_the_number_of_updates_since_the_read(self, method: str) -> None:
        """Rank 1 reads first and publishes last; meanwhile rank 0 does three rounds."""

        def main(rank: Rank) -> Statistics:
            shared = share(rank, method)
            x = torch.empty(DIM)
            for _ in range(3 if rank.comm.rank == 0 else 1):
                shared.read(x)
                rank.clock.charge(1 if rank.comm.rank == 0 else 20)
                shared.publish(torch.ones(DIM), 0.1)
            rank.comm.barrier()
            found: Statistics = shared.statistics()
            return found

        assert on_sim(main, 2, **SLOW)[0].staleness == {0: 3, 3: 1}

    @pytest.mark.parametrize("method", [*EXACT, "hogwild"])
    def test_a_late_read_is_not_stale(self, method: str) -> None:
        """Rank 0 reads at 9 s what rank 1 published at 1 s, and nothing happens after that."""

        def main(rank: Rank) -> tuple[float, Statistics]:
            shared = share(rank, method)
            x = torch.empty(DIM)
            if rank.comm.rank == 1:
                shared.read(x)
                rank.clock.charge(1)
            else:
                rank.clock.charge(9)
                shared.read(x)
            shared.publish(torch.ones(DIM), 1.0)
            return x[0].item(), shared.statistics()

        seen, statistics = on_sim(main, 2, **SLOW)[0]
        assert seen == -1
        assert statistics.staleness == {0: 2}

    @pytest.mark.parametrize("handling", get_args(Handling))
    def test_a_stale_gradient_is_tempered(self, handling: str) -> None:
        """Rank 1's gradient of 1 is 2 updates old; from 0 these went to -2."""

        def main(rank: Rank) -> float:
            shared = share(rank, "mutex", handling=handling)
            x = torch.empty(DIM)
            for _ in range(2 if rank.comm.rank == 0 else 1):
                shared.read(x)
                rank.clock.charge(1 if rank.comm.rank == 0 else 20)
                shared.publish(torch.ones(DIM), 1.0)
            rank.comm.barrier()
            shared.read(x)
            return x[0].item()

        factor = {
            "none": 1.0,
            "inverse": 1 / 3,
            "max1": 1 / 2,
            "exponential": math.exp(-2 / 3 * math.log(1 + 3 / 2) * 2),
            "tail": 1.0,  # the first update that rank 1 has seen
            "gap": 1 / (2 + 1),  # 2 away, and steps are 1
            "gap-mean": 1 / (2 + 1),
            "delay-compensated": 1 - 0.04 * 2,
        }[handling]
        assert on_sim(main, 2, **SLOW)[0] == pytest.approx(-2 - factor, rel=1e-5)
