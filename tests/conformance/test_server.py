"""The parameter server under stragglers, from its event log."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import hocket


def run(tmp_path: Path, strategy: str, workers: int = 4, stragglers: str = "1x4", **settings: Any) -> hocket.Result:
    return hocket.fit(
        "digits", strategy=strategy, workers=workers, engine="sim", sim={"stragglers": stragglers}, momentum=0.0,
        batch=16, epochs=2, trace=1_000_000, out=tmp_path / "run", progress=False, **settings,
    )  # fmt: skip


def updates(tmp_path: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    return [e for e in events if e["event"] == "update"]


@pytest.mark.parametrize("slack", [0, 1, 3])
def test_the_clocks_never_drift_apart_by_more_than_slack_plus_one(tmp_path: Path, slack: int) -> None:
    result = run(tmp_path, f"server:mode=ssp,slack={slack}")
    clock = Counter(dict.fromkeys(range(4), 0))
    widest = 0
    for update in updates(tmp_path):
        clock[update["worker"]] += 1
        running = [clock[i] for i in clock if clock[i] < result.steps] or [result.steps]
        widest = max(widest, clock[update["worker"]] - min(running))
    assert widest == slack + 1, "a straggler makes the others use all their slack, and no more"


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
    seconds = {
        mode: run(tmp_path / mode, f"server:mode={mode},slack=2", workers=8).virtual_seconds
        for mode in ("async", "ssp", "sync")
    }
    assert seconds["async"] <= seconds["ssp"] <= seconds["sync"]


def test_servers_share_the_vector(tmp_path: Path) -> None:
    """Three servers: the same result as one, and each sends a third."""
    one = run(tmp_path / "one", "server:mode=sync")
    three = run(tmp_path / "three", "server:mode=sync,servers=3")
    for name, tensor in one.state.items():
        assert three.state[name].equal(tensor)
    assert three.virtual_seconds < one.virtual_seconds, "three network cards carry more than one"
