"""Runs in simulated shared memory: what they take, who waits, and how many workers they bear."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, get_args

import pytest
import tiny
import torch
from tiny import PARAMETERS, simulated

import hocket
from hocket.core.sharing import Method
from hocket.core.staleness import Handling
from hocket.engines.sim_memory import SimLock

METHODS = get_args(Method)
EXACT = ("mutex", "rwlock", "leashed")


def trained(strategy: str, workers: int, sim: dict[str, Any] | None = None, **settings: Any) -> hocket.Result:
    """A tiny task whose 40 bytes of parameters take 40 us a pass, against 1 ms of compute."""
    made = tiny.task(samples, batch=1) if (samples := settings.pop("samples", 0)) else tiny.task(6 * workers, batch=1)
    return simulated(
        made, {"compute": "1ms", "memory": "1MB", **(sim or {})}, workers=workers, strategy=strategy, **settings
    )


class TestTime:
    """To the last microsecond, as in test_sim.py."""

    steps, compute_s, pass_s = 6, 1e-3, PARAMETERS * 4e-6

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("block", [3, 1024])
    def test_a_read_is_a_pass_and_an_update_two(self, method: str, block: int) -> None:
        """Leashed computes its gradient in place, so that a read is free."""
        result = trained(method, 1, {"block": block})
        reads = 0 if method == "leashed" else self.steps + 2  # before the first step, after each, and the last look
        expected = self.steps * (self.compute_s + 2 * self.pass_s) + reads * self.pass_s
        assert result.virtual_seconds == pytest.approx(expected, rel=1e-9)
        assert result.shared is not None
        assert result.shared["updates_per_s"] == pytest.approx(self.steps / expected, rel=1e-9)

    def test_a_mutex_lets_one_in_after_the_other(self) -> None:
        """All come at once: the k-th waits for k passes, and has its gradient k passes late."""
        made = tiny.task(4, batch=1)
        result = simulated(made, {"compute": "1ms", "memory": "1MB"}, workers=4, strategy="mutex")
        wait_s = result.shared["lock_wait_s"] if result.shared else math.nan
        first_reads = (1 + 2 + 3) * self.pass_s
        # Updates and the reads after them: the k-th comes k passes after the first and finds k updates (2 passes
        # each) and the reads of those who were through; all of that is at least this long.
        assert wait_s >= first_reads + (1 + 2 + 3) * self.pass_s


@pytest.mark.parametrize("strategy", ["mutex", "rwlock", "mutex:backoff=exponential", "rwlock:backoff=yield"])
def test_all_waits_for_a_lock_are_counted(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    take = SimLock.take

    def noted(self: SimLock, rank: int, exclusive: bool) -> float:
        waits.append(take(self, rank, exclusive))
        return waits[-1]

    monkeypatch.setattr(SimLock, "take", noted)
    result = trained(strategy, 8, {"compute": "10us"})
    assert result.shared is not None
    assert result.shared["lock_wait_s"] == pytest.approx(sum(waits))
    assert sum(waits) > 8 * 40e-6


class TestManyWorkers:
    @pytest.mark.parametrize("method", METHODS)
    def test_64_run_the_same_twice(self, method: str) -> None:
        one, two = (trained(method, 64, {"compute": "lognormal:1ms:0.3"}, samples=150) for _ in range(2))
        assert one.virtual_seconds == two.virtual_seconds
        assert one.shared == two.shared
        assert one.staleness == two.staleness
        assert one.curve == two.curve
        assert one.time_to_loss == two.time_to_loss
        for name, tensor in one.state.items():
            assert torch.equal(tensor, two.state[name])
        assert (
            one.shared is not None and one.shared["updates"] == 150
        )  # of one sample each; in the last step some workers get none
        assert one.verdict == "finished"

    def test_another_seed_is_another_run(self) -> None:
        one, two = (trained("hogwild", 8, {"compute": "lognormal:1ms:0.3", "seed": s}) for s in (1, 2))
        assert one.virtual_seconds != two.virtual_seconds

    @pytest.mark.parametrize("method", METHODS)
    def test_staleness_grows_with_the_workers(self, method: str) -> None:
        """While one computes, the others publish: near workers - 1."""
        means = [trained(method, n, {"compute": "lognormal:1ms:0.3"}).staleness["mean"] for n in (1, 2, 6, 20)]
        assert means[0] == 0
        assert all(a < b for a, b in pairwise(means))
        assert 10 < means[3] < 25

    def test_locks_wait_in_the_order_that_theory_predicts(self) -> None:
        """Where memory is the bottleneck: readers share a rwlock, everybody shares nothing of a mutex."""
        waits = {m: trained(m, 16, {"memory": "100KB"}).shared["lock_wait_s"] for m in METHODS}  # type: ignore[index]
        assert waits["mutex"] > waits["rwlock"] > 0
        assert waits["hogwild"] == 0 < waits["leashed"], "whose updates fail while another publishes"

    @pytest.mark.parametrize("method", EXACT)
    def test_contention_grows_with_the_workers(self, method: str) -> None:
        """Waits of a lock, or failed tries, an update."""

        def contention(workers: int) -> float:
            shared = trained(method, workers, {"memory": "200KB"}).shared
            assert shared is not None
            tries = sum(int(k) * n for k, n in shared["failed_tries"].items())
            return (tries if method == "leashed" else shared["lock_wait_s"]) / shared["updates"]

        assert contention(1) == 0 < contention(4) < contention(16)

    def test_without_persistence_leashed_drops_under_contention_and_else_does_not(self) -> None:
        hasty = trained("leashed:persistence=0", 16, {"memory": "100KB"})
        patient = trained("leashed:persistence=inf", 16, {"memory": "100KB"})
        assert hasty.shared is not None and patient.shared is not None
        assert hasty.shared["dropped"] > 0 == patient.shared["dropped"]
        assert hasty.shared["updates"] + hasty.shared["dropped"] == patient.shared["updates"] == 6 * 16
        assert sum(hasty.staleness["histogram"].values()) == hasty.shared["updates"]

    @pytest.mark.parametrize("method", METHODS)
    def test_a_slow_worker_holds_nobody_up(self, method: str) -> None:
        """There is one pool of batches: who is fast takes more of them."""
        result = trained(method, 4, {"stragglers": "1x5"}, samples=80)
        steps = [worker["steps"] for worker in result.per_worker]
        assert steps[1] < min(steps[0], *steps[2:]) / 3
        assert sum(steps) == 80


@pytest.mark.parametrize("backoff", ["none", "constant", "exponential", "yield"])
@pytest.mark.parametrize("method", EXACT)
def test_every_backoff_trains(method: str, backoff: str) -> None:
    result = trained(f"{method}:backoff={backoff},backoff_us=50", 4, {"memory": "4MB"})
    assert result.verdict == "finished"
    assert result.shared is not None and result.shared["updates"] == 24


@pytest.mark.parametrize("method", METHODS)
def test_every_way_to_temper_changes_what_is_learnt(method: str) -> None:
    """With 4 workers most updates are stale. Their speeds differ: in step, hogwild's would all begin at 0."""
    noisy = {"compute": "lognormal:1ms:0.3"}
    plain = trained(f"{method}:stale=none", 4, noisy)
    assert plain.staleness["max"] >= 2
    for handling in get_args(Handling):
        result = trained(f"{method}:stale={handling}", 4, noisy)
        assert result.verdict == "finished"
        assert result.shared is not None
        assert sum(result.staleness["histogram"].values()) == result.shared["updates"] == 24
        same = all(torch.equal(tensor, plain.state[name]) for name, tensor in result.state.items())
        assert same == (handling == "none"), handling
