"""The parameter server under stragglers, from its event log."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import hocket
from hocket.core.serving import Server
from hocket.strategies.gossip import neighbours


def run(tmp_path: Path, strategy: str, workers: int = 4, stragglers: str = "1x4", **settings: Any) -> hocket.Result:
    return hocket.fit(
        "digits", strategy=strategy, workers=workers, engine="sim", sim={"stragglers": stragglers}, momentum=0.0,
        batch=16, epochs=2, trace=1_000_000, out=tmp_path / "run", progress=False, **settings,
    )  # fmt: skip


def updates(tmp_path: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    return [e for e in events if e["event"] == "update"]


def widest_gap(tmp_path: Path, result: hocket.Result) -> int:
    """The most steps that a worker was ahead of the slowest that was still at work."""
    last = {i: worker["steps"] for i, worker in enumerate(result.per_worker)}
    clock = Counter(dict.fromkeys(last, 0))
    widest = 0
    for update in updates(tmp_path):
        clock[update["worker"]] += 1
        running = [clock[i] for i in clock if clock[i] < last[i]] or [clock[update["worker"]]]
        widest = max(widest, clock[update["worker"]] - min(running))
    return widest


@pytest.mark.parametrize("slack", [0, 1, 3])
def test_the_clocks_never_drift_apart_by_more_than_slack_plus_one(tmp_path: Path, slack: int) -> None:
    result = run(tmp_path, f"server:mode=ssp,slack={slack}")
    assert widest_gap(tmp_path, result) == slack + 1, "a straggler makes the others use all their slack, and no more"


@pytest.mark.parametrize("straggler", [2.5, 4])
def test_a_dynamic_slack_stays_in_its_range(tmp_path: Path, straggler: float) -> None:
    """And it uses the range: with one that is 2.5 times slower, waiting at the low end is not the best."""
    result = run(tmp_path, "server:mode=dssp,low=1,high=6", stragglers=f"1x{straggler}")
    widest = widest_gap(tmp_path, result)
    assert 1 + 1 < widest <= 6 + 1
    fixed = run(tmp_path / "fixed", "server:mode=ssp,slack=1", stragglers=f"1x{straggler}")
    assert result.virtual_seconds <= fixed.virtual_seconds


def test_downpour_adds_up_before_it_pushes(tmp_path: Path) -> None:
    """A fifth of the messages, each with the sum of five gradients, and it learns all the same."""
    each = run(tmp_path / "each", "server:mode=async,stale=none")
    fifth = run(tmp_path / "fifth", "server:mode=async,stale=none,push_every=5,fetch_every=5")
    assert fifth.bytes_sent < each.bytes_sent / 4
    assert sum(fifth.staleness["histogram"].values()) < sum(each.staleness["histogram"].values()) / 4
    assert fifth.test_accuracy > 0.5


@pytest.mark.parametrize("mode", ["async", "ssp", "dssp"])
@pytest.mark.parametrize("workers", [8, 16])
def test_the_defaults_hold_what_staleness_would_break(mode: str, workers: int) -> None:
    """digits has momentum 0.9: a server that holds it diverges where as many gradients are on their way."""
    settings: Any = dict(workers=workers, engine="sim", progress=False, sim={"compute": "lognormal:1ms:0.2"})
    assert hocket.fit("digits", strategy=f"server:mode={mode}", **settings).test_accuracy > 0.955


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 8, 16, 32])
def test_blobs_is_learnt_as_well_as_serially(workers: int) -> None:
    settings: Any = dict(engine="sim", progress=False, epochs=20, sim={"compute": "lognormal:1ms:0.2"})
    serial = hocket.fit("blobs", strategy="serial", **settings).test_accuracy
    many = hocket.fit("blobs", strategy="server:mode=async", workers=workers, **settings).test_accuracy
    assert many > serial - 0.005


@pytest.mark.parametrize(("pushes", "fetches"), [(1, 1), (4, 4), (4, 2), (3, 5)])
def test_the_rate_falls_by_the_epoch_however_seldom_downpour_pushes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pushes: int, fetches: int
) -> None:
    """Each worker's rate is that of the epoch its batch is from, and the server steps at the rate it is sent."""
    rates: list[float] = []
    descend = Server.descend

    def noted(self: Server, g: torch.Tensor) -> None:
        rates.append(self.reach)
        descend(self, g)

    monkeypatch.setattr(Server, "descend", noted)
    strategy = f"server:mode=async,push_every={pushes},fetch_every={fetches}"
    hocket.fit(
        "digits", strategy=strategy, workers=2, engine="sim", epochs=5, lr=0.1, lr_decay=0.5, momentum=0.0, trace=0,
        progress=False,
    )  # fmt: skip
    expected = [0.1 * 0.5**epoch for epoch in range(5)]
    counts = Counter(rates)
    assert sorted(counts, reverse=True) == pytest.approx(expected), "all five, and down to 0.00625"
    assert rates[-1] == pytest.approx(expected[-1])
    assert max(counts.values()) - min(counts.values()) <= 4, "each for an epoch"


def test_one_downpour_worker_that_reads_each_of_its_pushes_is_serial(tmp_path: Path) -> None:
    alone = run(tmp_path / "alone", "server:mode=async,stale=none", workers=1, stragglers="")
    serial = run(tmp_path / "serial", "serial", workers=1, stragglers="")
    for name, tensor in serial.state.items():
        torch.testing.assert_close(alone.state[name], tensor)


def test_the_staleness_of_a_sum_is_that_of_its_oldest_gradient(tmp_path: Path) -> None:
    """Workers push every fourth step and read at each: the oldest was computed at the read after the last push."""
    run(tmp_path, "server:mode=async,stale=none,lookahead=0,push_every=4", workers=4, stragglers="")
    for worker in range(4):
        log = [update for update in updates(tmp_path) if update["worker"] == worker]
        for before, update in pairwise(log):
            between = update["read"] - before["version"]
            assert 0 <= between <= 1, "the read that came with the worker's last push, and not the one after"
            assert update["staleness"] == update["version"] - 1 - update["read"]


def test_without_slack_limits_they_do_drift(tmp_path: Path) -> None:
    run(tmp_path, "server:mode=async")
    clock: Counter[int] = Counter()
    widest = 0
    for update in updates(tmp_path):
        clock[update["worker"]] += 1
        widest = max(widest, max(clock.values()) - clock[1])
    assert widest > 10


@pytest.mark.parametrize("mode", ["sync", "async", "ssp"])
def test_each_updates_staleness_is_a_recount_of_the_log(tmp_path: Path, mode: str) -> None:
    result = run(tmp_path, f"server:mode={mode}")
    applied: list[int] = []
    recount: Counter[int] = Counter()
    for update in updates(tmp_path):
        between = sum(version > update["read"] for version in applied)
        assert update["staleness"] == between
        recount[between] += 1
        applied.append(update["version"])
    assert result.staleness["histogram"] == {str(k): recount[k] for k in sorted(recount)}
    assert result.staleness["max"] == max(recount)
    assert (max(recount) == 0) == (mode == "sync")


def test_under_a_straggler_the_freer_are_the_faster(tmp_path: Path) -> None:
    """One of 8 is 4 times slower: who need not wait for it has 7.25 workers' speed, who must has 8 / 4."""
    seconds = {
        strategy: run(tmp_path / strategy, strategy, workers=8).virtual_seconds
        for strategy in (
            "server:mode=async",
            "server:mode=ssp,slack=2",
            "server:mode=sync",
            "gossip:kind=adpsgd",
            "gossip:kind=pull",
            "gossip:kind=push",
            "gossip",
        )
    }
    freely, stale, together, pairwise, pull, push, neighbours = seconds.values()
    assert freely <= stale <= together
    assert freely < together / 2.5
    assert max(pairwise, pull, push) < neighbours / 2.5, "gossip in which nobody waits is not held back by the slow one"


@pytest.mark.parametrize("graph", ["ring", "complete"])
def test_pairwise_gossip_pairs_every_even_rank_with_its_odd_neighbours(tmp_path: Path, graph: str) -> None:
    result = run(tmp_path, f"gossip:kind=adpsgd,graph={graph}", workers=8, stragglers="")
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    asked = {(e["rank"], e["peer"]) for e in events if e["event"] == "send" and e["kind"] == "model"}
    assert asked == {(i, j) for i in range(0, 8, 2) for j in neighbours(graph, 8, i) if j % 2}
    assert result.consensus_distance > 0


@pytest.mark.parametrize("kind", ["adpsgd", "pull", "push"])
def test_gossip_in_which_nobody_waits_learns_under_a_straggler(kind: str) -> None:
    """Two workers that asked each other at once would change places for ever instead of meeting."""
    result = hocket.fit(
        "digits", strategy=f"gossip:kind={kind}", workers=4, engine="sim", sim={"stragglers": "1x3"}, progress=False
    )
    assert result.test_accuracy > 0.95


def test_the_fast_do_the_work_of_the_slow_and_every_sample_counts_once(tmp_path: Path) -> None:
    result = run(tmp_path, "server:mode=async", workers=4, stragglers="1x4")
    samples = [worker["samples"] for worker in result.per_worker]
    assert sum(samples) == 2 * 1437
    assert samples[1] < min(samples[0], samples[2], samples[3]) / 3


def test_servers_share_the_vector(tmp_path: Path) -> None:
    """Three servers: the same result as one, and each sends a third."""
    one = run(tmp_path / "one", "server:mode=sync")
    three = run(tmp_path / "three", "server:mode=sync,servers=3")
    for name, tensor in one.state.items():
        assert three.state[name].equal(tensor)
    assert three.virtual_seconds < one.virtual_seconds, "three network cards carry more than one"
