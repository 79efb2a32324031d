"""Virtual time, to the last microsecond: what the simulator charges for gradients, messages and collectives."""

from __future__ import annotations

import math
import random
import time
from itertools import pairwise
from typing import Any

import pytest
import tiny
import torch
from tiny import PARAMETERS, on_sim, simulated

from hocket.core.comm import ANY, Rank
from hocket.core.errors import UserError
from hocket.core.message import Message
from hocket.core.units import bytes_per_second, seconds
from hocket.engines.catalogue import engine
from hocket.engines.sim import Sim

BATCH, STEPS, COMPUTE_S, LATENCY_S, BYTE_S = 4, 3, 0.002, 0.0005, 1e-3
NETWORK = dict(latency="500us", bandwidth="1KB")
VECTOR = 4 * PARAMETERS
"""Bytes of an all-reduce: the gradient alone, as all know how many samples a step has."""


def all_reduce_s(workers: int, nbytes: int = VECTOR) -> float:
    """Rabenseifner: log2(p) rounds there and back, and each byte but a p-th twice."""
    return 2 * math.ceil(math.log2(workers)) * LATENCY_S + 2 * (workers - 1) / workers * nbytes * BYTE_S


def message(nbytes: int = 100) -> Message:
    made = Message("", (), (torch.zeros(nbytes - 16, dtype=torch.uint8),))
    assert made.nbytes == nbytes
    return made


class TestTraining:
    def seconds(self, workers: int, samples: int | None = None, strategy: str = "allreduce", **sim: Any) -> float:
        task = tiny.task(samples or workers * BATCH * STEPS, batch=BATCH)
        result = simulated(task, {"compute": "2ms", **NETWORK, **sim}, workers=workers, strategy=strategy)
        assert result.virtual_seconds is not None
        return result.virtual_seconds

    @pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8])
    def test_allreduce(self, workers: int) -> None:
        assert self.seconds(workers) == pytest.approx(STEPS * (COMPUTE_S + all_reduce_s(workers)), rel=1e-9)

    def test_serial_is_compute_alone(self) -> None:
        assert self.seconds(1, strategy="serial") == pytest.approx(STEPS * COMPUTE_S, rel=1e-9)

    def test_an_uneven_last_batch_costs_its_share(self) -> None:
        """2 workers share 3 samples: the one with 2 of 4 takes half of a batch's time, the other waits."""
        expected = 2 * COMPUTE_S + COMPUTE_S / 2 + 3 * all_reduce_s(2)
        assert self.seconds(2, samples=2 * 2 * BATCH + 3) == pytest.approx(expected, rel=1e-9)

    def test_local_sgd_communicates_less(self) -> None:
        """3 steps: an average after the second, and the farewell."""
        expected = STEPS * COMPUTE_S + 2 * all_reduce_s(2)
        assert self.seconds(2, strategy="local-sgd:every=2") == pytest.approx(expected, rel=1e-9)

    @pytest.mark.parametrize("stragglers", ["1x3", "1x3+2x1.5", "4x3"])
    def test_a_synchronous_run_is_as_slow_as_its_slowest_worker(self, stragglers: str) -> None:
        expected = STEPS * (3 * COMPUTE_S + all_reduce_s(4))
        assert self.seconds(4, stragglers=stragglers) == pytest.approx(expected, rel=1e-9)

    def test_evaluation_is_outside_the_clock(self) -> None:
        task = tiny.task(2 * BATCH, batch=BATCH)
        result = simulated(task, {"compute": "2ms", **NETWORK}, workers=2, epochs=5)
        times = [point["seconds"] for point in result.curve]
        step = COMPUTE_S + all_reduce_s(2)
        assert times == pytest.approx([k * step for k in range(1, 6)], rel=1e-9)


class TestCompute:
    def elapsed(self, rank: Rank, charges: int = 10) -> float:
        for _ in range(charges):
            rank.clock.charge(1.0)
        return rank.clock.now()

    def test_stragglers_are_the_ranks_after_0_and_add_up(self) -> None:
        found = on_sim(self.elapsed, 5, compute="1ms", stragglers="1x3+2x1.5")
        assert found == pytest.approx([0.01, 0.03, 0.015, 0.015, 0.01])

    def test_lognormal_is_a_function_of_the_seed(self) -> None:
        def run(seed: int) -> list[float]:
            return on_sim(self.elapsed, 3, compute="lognormal:2ms:0.5", seed=seed)

        assert run(1) == run(1)
        assert len({*run(1), *run(2)}) == 6, "every rank draws its own times"

    def test_lognormal_has_its_median_and_spread(self) -> None:
        def draws(rank: Rank) -> list[float]:
            times = [0.0] + [self.elapsed(rank, 1) for _ in range(400)]
            return [math.log(b - a) for a, b in pairwise(times)]

        logs = torch.tensor(on_sim(draws, 1, compute="lognormal:2ms:0.5")[0])
        assert logs.median().item() == pytest.approx(math.log(0.002), abs=0.1)
        assert logs.std().item() == pytest.approx(0.5, abs=0.06)

    def test_lognormal_without_spread_is_constant(self) -> None:
        assert on_sim(self.elapsed, 1, compute="lognormal:2ms:0") == pytest.approx([0.02])

    def test_measured_trains(self) -> None:
        result = simulated(tiny.task(), {"compute": "measured"}, workers=2)
        assert result.verdict == "finished" and 0 < (result.virtual_seconds or 0) < 10


def burn(seconds: float) -> None:
    """Use the processor, as a gradient does."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class TestMeasured:
    """The times are the processor's: at least what was burnt, and not much more."""

    def test_a_gradient_costs_what_it_took(self) -> None:
        def main(rank: Rank) -> float:
            burn(0.02)
            rank.clock.charge(1.0)
            return rank.clock.now()

        fast, slow = on_sim(main, 2, compute="measured", stragglers="1x3")
        assert 0.02 <= fast < 0.03 and 0.06 <= slow < 0.09

    def test_time_is_charged_once(self) -> None:
        def main(rank: Rank) -> float:
            for _ in range(4):
                burn(0.01)
                rank.clock.charge(1.0)
            return rank.clock.now()

        assert 0.04 <= on_sim(main, 1, compute="measured")[0] < 0.06

    def test_what_is_done_while_paused_costs_nothing(self) -> None:
        def main(rank: Rank) -> float:
            with rank.clock.paused():
                burn(0.05)
            rank.clock.charge(1.0)
            return rank.clock.now()

        assert on_sim(main, 1, compute="measured")[0] < 0.04


class TestMessages:
    def arrivals(self, rank: Rank, count: int) -> list[float]:
        return [(rank.comm.recv(ANY), rank.clock.now())[1] for _ in range(count)]

    def test_latency_and_bandwidth(self) -> None:
        def main(rank: Rank) -> Any:
            if rank.comm.rank == 1:
                return self.arrivals(rank, 1)
            rank.comm.send(1, message(100))
            return rank.clock.now()

        sent, (arrived,) = on_sim(main, 2, **NETWORK)
        assert sent == pytest.approx(100 * BYTE_S), "the sender is held up by its card alone"
        assert arrived == pytest.approx(LATENCY_S + 100 * BYTE_S)

    def test_messages_queue_at_the_senders_card(self) -> None:
        def main(rank: Rank) -> Any:
            if rank.comm.rank > 0:
                return self.arrivals(rank, 1)
            for to in (1, 2, 3):
                rank.comm.isend(to, message(100))
            return rank.clock.now()

        sender, *receivers = on_sim(main, 4, **NETWORK)
        assert sender == 0, "isend does not wait"
        assert [a for (a,) in receivers] == pytest.approx([LATENCY_S + k * 100 * BYTE_S for k in (1, 2, 3)])

    @pytest.mark.parametrize("senders", [1, 2, 7])
    def test_messages_queue_at_the_receivers_card(self, senders: int) -> None:
        """Incast: k senders of n bytes take k n byte times, though each has a card of its own."""

        def main(rank: Rank) -> Any:
            if rank.comm.rank == 0:
                return self.arrivals(rank, senders)
            rank.comm.send(0, message(100))
            return rank.clock.now()

        arrivals, *sent = on_sim(main, senders + 1, **NETWORK)
        assert arrivals == pytest.approx([LATENCY_S + k * 100 * BYTE_S for k in range(1, senders + 1)])
        assert sent == pytest.approx([100 * BYTE_S] * senders)

    def test_pairs_do_not_disturb_each_other(self) -> None:
        def main(rank: Rank) -> Any:
            me = rank.comm.rank
            if me % 2:
                return self.arrivals(rank, 1)[0]
            rank.comm.send(me + 1, message(100))
            return None

        assert on_sim(main, 8, **NETWORK)[1::2] == pytest.approx([LATENCY_S + 100 * BYTE_S] * 4)

    def test_the_receivers_card_takes_what_comes_first(self) -> None:
        """Rank 1 is busy with a long message to rank 3 before it can send to rank 0; rank 2 is not."""

        def main(rank: Rank) -> Any:
            match rank.comm.rank:
                case 0:
                    return self.arrivals(rank, 2)
                case 1:
                    rank.comm.isend(3, message(1000))
                    rank.comm.isend(0, message(100))
                case 2:
                    rank.clock.charge(1.0)
                    rank.comm.send(0, message(100))
                case 3:
                    rank.comm.recv(1)
            return None

        first, second = on_sim(main, 4, compute="1ms", **NETWORK)[0]
        assert first == pytest.approx(0.001 + LATENCY_S + 100 * BYTE_S)
        assert second == pytest.approx(LATENCY_S + 1100 * BYTE_S)

    def test_messages_arrive_in_the_order_of_virtual_time(self) -> None:
        """Rank 1 is started first but is slow: what it sends comes last."""

        def main(rank: Rank) -> Any:
            if rank.comm.rank == 0:
                return [rank.comm.recv(ANY)[0] for _ in range(3)]
            rank.clock.charge(4.0 - rank.comm.rank)
            rank.comm.send(0, Message())
            return None

        assert on_sim(main, 4, compute="1s")[0] == [3, 2, 1]

    def test_a_receive_gives_up_at_its_virtual_timeout(self) -> None:
        def main(rank: Rank) -> Any:
            if rank.comm.rank == 1:
                rank.clock.charge(1.0)
                rank.comm.send(0, Message())
                return None
            with pytest.raises(TimeoutError):
                rank.comm.recv(1, timeout=0.25)
            gave_up = rank.clock.now()
            rank.comm.recv(1)
            return gave_up, rank.clock.now() >= 1.0

        assert on_sim(main, 2, compute="1s")[0] == (0.25, True)

    def test_a_ring_of_200(self) -> None:
        def main(rank: Rank) -> float:
            me, n = rank.comm.rank, rank.comm.size
            if me:
                rank.comm.recv(me - 1)
            rank.comm.send((me + 1) % n, message(100))
            if not me:
                rank.comm.recv(n - 1)
            return rank.clock.now()

        assert on_sim(main, 200, **NETWORK)[0] == pytest.approx(200 * (LATENCY_S + 100 * BYTE_S))


class TestCollectives:
    def test_an_all_reduce_costs_a_reduce_scatter_and_an_all_gather(self) -> None:
        def main(rank: Rank) -> list[float]:
            n = rank.comm.size
            part, whole = torch.zeros(5), torch.zeros(5 * n)
            times = [rank.clock.now()]
            rank.comm.all_reduce(whole)
            times.append(rank.clock.now())
            rank.comm.reduce_scatter(part, whole)
            rank.comm.all_gather(whole, part)
            times.append(rank.clock.now())
            return [b - a for a, b in pairwise(times)]

        for workers in (2, 3, 6):
            for one, two in on_sim(main, workers, **NETWORK):
                assert one == pytest.approx(two) == pytest.approx(all_reduce_s(workers, 4 * 5 * workers))

    def test_everybody_leaves_when_the_last_has_come(self) -> None:
        def main(rank: Rank) -> float:
            rank.clock.charge(rank.comm.rank)
            rank.comm.barrier()
            return rank.clock.now()

        assert on_sim(main, 4, compute="1s", **NETWORK) == pytest.approx([3 + 2 * LATENCY_S] * 4)

    def test_computing_hides_an_all_reduce_that_is_under_way(self) -> None:
        def main(rank: Rank) -> float:
            request = rank.comm.iall_reduce(torch.zeros(10))
            rank.clock.charge(1.0)
            request.wait()
            return rank.clock.now()

        assert on_sim(main, 2, compute="1s", **NETWORK) == pytest.approx([1.0, 1.0])


class TestTies:
    def order(self, ties: int) -> list[int]:
        def main(rank: Rank) -> Any:
            if rank.comm.rank == 0:
                return [rank.comm.recv(ANY)[0] for _ in range(5)]
            rank.comm.send(0, Message())
            return None

        return on_sim(main, 6, ties=ties)[0]

    def test_simultaneous_messages_come_in_another_order(self) -> None:
        assert self.order(0) == [1, 2, 3, 4, 5]
        found = [self.order(ties) for ties in range(1, 5)]
        assert all(sorted(order) == [1, 2, 3, 4, 5] for order in found)
        assert len({tuple(order) for order in found}) > 1
        assert found == [self.order(ties) for ties in range(1, 5)], "and every order repeats"

    @pytest.mark.parametrize("strategy", ["allreduce", "local-sgd:every=2"])
    def test_a_synchronous_run_does_not_depend_on_them(self, strategy: str) -> None:
        runs = [simulated(tiny.task(), {"ties": t}, workers=3, strategy=strategy, batch=2) for t in range(4)]
        for run in runs[1:]:
            assert run.virtual_seconds == runs[0].virtual_seconds
            assert all(torch.equal(run.state[name], runs[0].state[name]) for name in run.state)


def test_the_result_does_not_depend_on_the_times() -> None:
    """Under a synchronous strategy only the clock knows of slow workers and slow links."""
    quick = simulated(tiny.task(), {"compute": "1us"}, workers=3, batch=2)
    slow = simulated(tiny.task(), {"compute": "lognormal:1s:0.9", "stragglers": "1x9"}, workers=3, batch=2)
    threads = tiny.fit(tiny.task(), workers=3, batch=2)
    assert (slow.virtual_seconds or 0) > 1000 * (quick.virtual_seconds or 0)
    for name in quick.state:
        assert torch.equal(quick.state[name], slow.state[name])
        assert torch.equal(quick.state[name], threads.state[name])


def test_the_users_random_numbers_stay_as_they_were() -> None:
    state = random.getstate()
    on_sim(lambda rank: rank.clock.charge(1.0), 3, compute="lognormal:1ms:0.3", ties=4)
    assert random.getstate() == state


class TestOptions:
    @pytest.mark.parametrize(
        "options",
        [
            dict(latency="1e308s"), dict(latency="1e9999s"), dict(compute="1e300h"), dict(compute="-1ms"),
            dict(bandwidth="1e308GB"), dict(bandwidth="1e-320bit"), dict(bandwidth="10"), dict(memory="0B"),
            dict(compute="lognormal:1ms:6"), dict(compute="lognormal:1ms:0.3ms"), dict(compute="lognormal:1ms:-1"),
            dict(compute="lognormal:1ms:nan"), dict(compute="lognormal"), dict(stragglers="1x" + "9" * 400),
            dict(stragglers="9" * 5000 + "x2"), dict(stragglers="x"), dict(block=0), dict(block=10**30),
            dict(workers=-1), dict(latency="٣ms"), dict(latency="1..2s"), dict(latency=""),
        ],
    )  # fmt: skip
    def test_refused(self, options: dict[str, Any]) -> None:
        (name,) = options
        with pytest.raises(UserError, match=name) as caught:
            Sim(**options)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 200

    def test_the_longest_times_add_up(self) -> None:
        def main(rank: Rank) -> float:
            rank.clock.charge(1.0)
            rank.comm.all_reduce(torch.ones(3))
            return rank.clock.now()

        found = on_sim(main, 3, compute="1e9s", latency="1e9s", bandwidth="0.001B", stragglers="2x999999999")
        assert len(set(found)) == 1 and 1e18 < found[0] < 1e19

    def test_the_number_of_workers_is_the_runs(self) -> None:
        with pytest.raises(UserError, match="no option of engine sim is called 'workers'"):
            engine.make("sim:workers=2")
        with pytest.raises(UserError, match="no option of sim is called 'workers'"):
            simulated(tiny.task(), {"workers": 1})

    @pytest.mark.parametrize(
        ("text", "value"),
        [("2ms", 0.002), ("50us", 5e-5), ("1.5", 1.5), ("10min", 600.0), ("2 h", 7200.0)],
    )
    def test_times(self, text: str, value: float) -> None:
        assert seconds(text, "x") == pytest.approx(value)

    @pytest.mark.parametrize(("text", "value"), [("10Gbit", 1.25e9), ("6GB", 6e9), ("8bit", 1.0), ("1 KB", 1e3)])
    def test_rates(self, text: str, value: float) -> None:
        assert bytes_per_second(text, "x") == pytest.approx(value)
