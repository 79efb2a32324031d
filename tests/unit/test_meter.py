"""Bytes and time are counted, not estimated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tiny import PARAMETERS, on_sim, on_threads, simulated

from hocket.core.comm import Rank
from hocket.core.message import Message
from hocket.measure import meter
from hocket.measure.meter import Metered, Totals
from hocket.measure.result import TIMES
from hocket.measure.trace import Trace

VECTOR = 4 * PARAMETERS


def metered(rank: Rank) -> Metered:
    return Metered(rank.comm, rank.clock, rank.status, Trace(0))


def totals(main: Callable[[Metered, Rank], None], size: int, **sim: Any) -> list[Totals]:
    """What each rank counted, on threads or, with options for it, on the simulator."""

    def body(rank: Rank) -> Totals:
        comm = metered(rank)
        main(comm, rank)
        with rank.clock.paused():
            comm.settle()
        return comm.totals

    return on_sim(body, size, **sim) if sim else on_threads(body, size)


class TestBytes:
    def sent(self, main: Callable[[Metered], None], size: int = 3) -> list[tuple[int, int]]:
        return [(t.bytes_sent, t.messages) for t in totals(lambda comm, _: main(comm), size)]

    def test_messages(self) -> None:
        message = Message("gradient", (1, 2), (torch.zeros(10),))

        def main(comm: Metered) -> None:
            if comm.rank == 0:
                comm.send(1, message)
                comm.isend(2, message).wait()
            else:
                comm.recv(0)

        assert self.sent(main) == [(2 * message.nbytes, 2), (0, 0), (0, 0)]

    def test_all_reduce(self) -> None:
        """7 elements for 3 ranks: chunks of 3, 2 and 2."""
        assert self.sent(lambda comm: comm.all_reduce(torch.zeros(7))) == [(4 * n, 0) for n in (10, 9, 9)]

    def test_overlapped_all_reduce_counts_the_same(self) -> None:
        plain = self.sent(lambda comm: comm.all_reduce(torch.zeros(7, dtype=torch.float64)))
        assert self.sent(lambda comm: comm.iall_reduce(torch.zeros(7, dtype=torch.float64)).wait()) == plain

    def test_the_other_collectives(self) -> None:
        part, whole = torch.zeros(2), torch.zeros(6)
        assert self.sent(lambda comm: comm.all_gather(whole.clone(), part)) == [(16, 0)] * 3
        assert self.sent(lambda comm: comm.reduce_scatter(part.clone(), whole)) == [(16, 0)] * 3
        assert self.sent(lambda comm: comm.broadcast(part.clone(), 1)) == [(0, 0), (16, 0), (0, 0)]
        assert self.sent(lambda comm: comm.barrier()) == [(0, 0)] * 3

    def test_a_part_counts_for_the_whole(self) -> None:
        def main(comm: Metered) -> None:
            comm.split(comm.rank % 2).all_reduce(torch.zeros(8))

        assert self.sent(main) == [(32, 0), (0, 0), (32, 0)], "rank 1 is alone"

    def test_alone_nothing_is_sent(self) -> None:
        assert self.sent(lambda comm: comm.all_reduce(torch.zeros(7)), 1) == [(0, 0)]

    @pytest.mark.parametrize(("strategy", "times"), [("allreduce", 6), ("local-sgd:every=4", 2)])
    def test_a_run(self, strategy: str, times: int) -> None:
        result = tiny.fit(tiny.task(24), workers=2, batch=2, strategy=strategy)
        assert result.steps == 6
        assert result.bytes_sent == times * 2 * VECTOR
        assert result.bytes_sent == sum(w["bytes_sent"] for w in result.per_worker)


NETWORK = dict(compute="1s", latency="100ms", bandwidth="1KB")
ALL_REDUCE_S = 2 * 0.1 + 40e-3  # two ranks, ten floats: each sends half of 40 bytes twice


class TestTime:
    """In the simulator every second is known: those of sending, transferring and waiting for others."""

    def times(self, main: Callable[[Metered, Rank], None], size: int = 2) -> list[tuple[float, float, float]]:
        return [(t.sending_s, t.transferring_s, t.waiting_s) for t in totals(main, size, **NETWORK)]

    def test_the_last_to_arrive_does_not_wait(self) -> None:
        def main(comm: Metered, rank: Rank) -> None:
            for _ in range(3):
                rank.clock.charge(1.0 + 2 * comm.rank)
                comm.all_reduce(torch.zeros(10))

        early, late = self.times(main)
        assert early == pytest.approx((0.0, 3 * ALL_REDUCE_S, 6.0))
        assert late == pytest.approx((0.0, 3 * ALL_REDUCE_S, 0.0))

    def test_each_collective_has_its_own_last(self) -> None:
        """The ranks take turns at being late: each waits once."""

        def main(comm: Metered, rank: Rank) -> None:
            for late in (0, 1):
                rank.clock.charge(3.0 if comm.rank == late else 1.0)
                comm.all_reduce(torch.zeros(10))

        assert self.times(main) == [pytest.approx((0.0, 2 * ALL_REDUCE_S, 2.0))] * 2

    def test_what_computing_hides_is_computing(self) -> None:
        def main(comm: Metered, rank: Rank) -> None:
            request = comm.iall_reduce(torch.zeros(10))
            rank.clock.charge(0.1)
            request.wait()

        assert self.times(main) == [pytest.approx((0.0, ALL_REDUCE_S - 0.1, 0.0))] * 2

    def test_who_started_an_overlapped_all_reduce_late_keeps_the_others_waiting(self) -> None:
        """And only from the moment at which they have nothing else to do; they may wait for several in any order, which
        travel one after the other."""

        def main(comm: Metered, rank: Rank) -> None:
            rank.clock.charge(1.0 + 2 * comm.rank)
            requests = [comm.iall_reduce(torch.zeros(10)) for _ in range(2)]
            rank.clock.charge(0.5 if comm.rank == 0 else 0.1)
            for request in requests if comm.rank else reversed(requests):
                request.wait()

        early, late = self.times(main)
        assert early == pytest.approx((0.0, 2 * ALL_REDUCE_S, 1.5))
        assert late == pytest.approx((0.0, 2 * ALL_REDUCE_S - 0.1, 0.0))

    def test_a_message_is_waited_for_until_it_is_sent_and_then_it_travels(self) -> None:
        message = Message("", (), (torch.zeros(21),))
        wire_s = message.nbytes * 1e-3

        def main(comm: Metered, rank: Rank) -> None:
            if comm.rank == 0:
                rank.clock.charge(2.0)
                comm.send(1, message)
            else:
                comm.recv(0)

        assert self.times(main) == [pytest.approx((wire_s, 0.0, 0.0)), pytest.approx((0.0, 0.1 + wire_s, 2.0))]

    def test_a_message_that_is_on_its_way_is_not_waited_for(self) -> None:
        message = Message("", (), (torch.zeros(21),))
        wire_s = message.nbytes * 1e-3

        def main(comm: Metered, rank: Rank) -> None:
            if comm.rank == 0:
                comm.isend(1, message).wait()
            else:
                rank.clock.charge(0.15)
                comm.recv()

        assert self.times(main) == [(0.0, 0.0, 0.0), pytest.approx((0.0, wire_s - 0.05, 0.0))]

    def test_what_nobody_stamped_is_waited_for(self) -> None:
        """As a server does for what it is told by others than the strategy."""

        def main(comm: Metered, rank: Rank) -> None:
            if comm.rank == 0:
                rank.clock.charge(2.0)
                comm.inner.isend(1, Message("away"))
            else:
                comm.recv()

        sending, transferring, waiting = self.times(main)[1]
        assert (sending, transferring) == (0.0, 0.0) and waiting > 2.0

    def test_a_part_of_the_ranks(self) -> None:
        """Ranks 0 and 1, and 2 and 3, meet apart; within a pair the second is late."""

        def main(comm: Metered, rank: Rank) -> None:
            part = comm.split(comm.rank // 2)
            rank.clock.charge(1.0 + comm.rank)
            part.all_reduce(torch.zeros(10))

        early, late = pytest.approx((0.0, ALL_REDUCE_S, 1.0)), pytest.approx((0.0, ALL_REDUCE_S, 0.0))
        assert self.times(main, 4) == [early, late, early, late]

    def test_who_is_early_to_a_split_waits(self) -> None:
        def main(comm: Metered, rank: Rank) -> None:
            rank.clock.charge(1.0 + 2 * comm.rank)
            comm.split(0)

        assert [waiting for _, _, waiting in self.times(main)] == pytest.approx([2.0, 0.0])

    def test_a_receive_that_gives_up_has_waited(self) -> None:
        def main(comm: Metered, rank: Rank) -> None:
            if comm.rank == 0:
                with pytest.raises(TimeoutError):
                    comm.recv(1, timeout=2.0)
                assert rank.status.operation == "compute"

        assert self.times(main)[0] == pytest.approx((0.0, 0.0, 2.0))

    def test_the_memory_of_a_long_run_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The ranks compare now and then, outside the clock, also while an all-reduce is under way."""
        monkeypatch.setattr(meter, "BLOCK", 4)
        kept = []

        def main(comm: Metered, rank: Rank) -> None:
            request = comm.iall_reduce(torch.zeros(10))
            for _ in range(10):
                rank.clock.charge(1.0 + 2 * comm.rank)
                comm.all_reduce(torch.zeros(10))
                kept.append(len(comm._met))
            request.wait()

        early, late = self.times(main)
        assert early == pytest.approx((0.0, 10 * ALL_REDUCE_S, 20.0))
        assert late == pytest.approx((0.0, 10 * ALL_REDUCE_S, 0.0))
        assert max(kept) == 4 * 4

    def test_the_operation_is_known_while_it_lasts(self) -> None:
        seen = []

        def main(comm: Metered, rank: Rank) -> None:
            if comm.rank == 0:
                comm.all_reduce(torch.zeros(10))
                assert rank.status.operation == "compute"
            else:
                seen.append(others[0].operation)
                comm.all_reduce(torch.zeros(10))

        others = []

        def body(rank: Rank) -> None:
            others.append(rank.status)
            main(metered(rank), rank)

        on_sim(body, 2)
        assert seen == ["all_reduce"]


class TestRuns:
    def test_the_parts_make_up_the_whole(self) -> None:
        for strategy in ("allreduce", "local-sgd:every=2"):
            result = tiny.fit(tiny.task(48, epochs=5), workers=3, strategy=strategy)
            assert len(result.per_worker) == 3
            for worker in result.per_worker:
                parts = [worker[name] for name in TIMES]
                assert min(parts) >= 0 and worker["transferring"] > 0
                assert sum(parts) == pytest.approx(worker["seconds"])

    def test_exact_with_a_straggler(self) -> None:
        """The others wait for what the straggler needs more, and transfer for as long as it does."""
        sim = {"compute": "2ms", "latency": "1ms", "bandwidth": "1KB", "stragglers": "1x3"}
        result = simulated(tiny.task(24), sim, workers=3, batch=2)
        steps, all_reduce_s = 4, 2 * 2 * 0.001 + 2 * (2 / 3) * VECTOR * 1e-3
        assert result.steps == steps
        for number, worker in enumerate(result.per_worker):
            slow = number == 1
            assert worker["computing"] == pytest.approx(steps * (0.006 if slow else 0.002))
            assert worker["waiting"] == pytest.approx(0.0 if slow else steps * 0.004)
            assert worker["transferring"] == pytest.approx(steps * all_reduce_s)
            assert worker["seconds"] == pytest.approx(result.virtual_seconds)
            assert worker["samples"] == 8


class TestTrace:
    def test_what_is_over_the_limit_is_counted(self) -> None:
        trace = Trace(3)
        for i in range(5):
            trace.add("e", i, i + 0.5, number=i)
        assert trace.take() == [{"event": "e", "t": i, "seconds": 0.5, "number": i} for i in range(3)]
        trace.add("e", 9, 9)
        assert trace.take() == [] and trace.dropped == 3

    def test_the_log_says_how_much_it_leaves_out(self, tmp_path: Path) -> None:
        def events(name: str, limit: int) -> list[dict[str, Any]]:
            tiny.fit(tiny.task(), workers=2, batch=2, trace=limit, out=tmp_path / name)
            return [json.loads(line) for line in (tmp_path / name / "events.jsonl").read_text().splitlines()]

        everything, some = events("all", 1000), events("some", 5)
        assert {e["event"] for e in everything} == {"gradient", "all_reduce", "barrier"}
        *kept, last = some
        assert [sum(e["rank"] == r for e in kept) for r in (0, 1)] == [5, 5]
        assert last == {"rank": -1, "event": "not-logged", "count": len(everything) - 10, "why": "trace=5"}
