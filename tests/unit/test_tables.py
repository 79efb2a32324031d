"""What a comparison says of runs whose outcome is known."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import tiny
from rich.console import Console
from torch import nn

import hocket
from hocket.lab import tables
from hocket.lab.compare import Comparison, Row
from hocket.lab.runs import Runs, overlap
from hocket.run.spec import RunSpec

RESULT = tiny.fit(tiny.task(target=0.5), strategy="serial", engine="sim")


def runs(times: list[float | None], metric: float = 0.9, **changes: Any) -> Runs:
    return Runs([dataclasses.replace(RESULT, time_to_target=t, test_metric=metric, **changes) for t in times])


def row(strategy: str, workers: int, found: Runs) -> Row:
    return Row(RunSpec("tiny", strategy=strategy, workers=workers), runs=found)


def comparison(*rows: Row, **settings: Any) -> Comparison:
    return Comparison(RunSpec("tiny", **settings), list(rows), len(rows[0].runs.results), 8.0, lower_is_better=False)


def printed(found: Comparison) -> list[str]:
    console = Console(width=250)
    with console.capture() as capture:
        console.print(tables.compared(found))
    return capture.get().splitlines()


SLOW = row("serial", 1, runs([4.0, 5.0, 4.5]))
MIDDLE = row("allreduce", 2, runs([2.0, 2.2, 2.1]))
FAST = row("local-sgd", 2, runs([1.0, 1.5, 1.2]))


class TestTheTable:
    def test_the_fastest_to_the_target_comes_first(self) -> None:
        lines = printed(comparison(SLOW, FAST, MIDDLE))
        assert [line.split()[0] for line in lines[1:]] == ["local-sgd", "allreduce", "serial"]
        assert "1.2 (1–1.5)" in lines[1] and "3 of 3" in lines[1]
        assert {"engine", "driver"} <= set(lines[0].split())
        assert "sim" in lines[1] and "pytorch" in lines[1]

    def test_runs_that_never_got_there_count_as_endless(self) -> None:
        """One that dropped them would put a strategy that fails now and then first."""
        lucky = row("gossip", 2, runs([0.5, None, None]))
        often = row("elastic", 2, runs([0.6, 0.7, None]))
        lines = printed(comparison(lucky, often, MIDDLE))
        assert [line.split()[0] for line in lines[1:]] == ["elastic", "allreduce", "gossip"]
        assert "0.7 (0.6–never)" in lines[1] and "2 of 3" in lines[1]
        assert "never (0.5–never)" in lines[3] and "1 of 3" in lines[3]

    def test_where_none_got_there_the_better_metric_comes_first(self) -> None:
        low, high = (row(s, 2, runs([None], metric)) for s, metric in (("allreduce", 0.3), ("elastic", 0.4)))
        assert [r.strategy for r in tables.ranked(comparison(low, high))] == ["elastic", "allreduce"]
        error = dataclasses.replace(comparison(low, high), lower_is_better=True)
        assert [r.strategy for r in tables.ranked(error)] == ["allreduce", "elastic"]

    def test_what_diverged_has_no_speed(self) -> None:
        lost = row("hogwild", 2, runs([None, None, None], verdict="diverged", samples_per_s=None))
        assert "–" in printed(comparison(lost, MIDDLE))[2].split()

    @pytest.mark.parametrize(
        ("target", "rule"),
        [(None, "every run lasts 8 epochs"), (0.9, "every run stops at 0.9, or after 8 epochs")],
    )
    def test_it_says_when_runs_stop(self, target: float | None, rule: str) -> None:
        assert rule in tables.rule(comparison(MIDDLE, FAST, target=target))


class TestTheVerdict:
    def test_who_is_how_much_faster_and_where(self) -> None:
        assert tables.verdict(comparison(SLOW, MIDDLE, FAST)) == (
            "Fastest to 0.5 here (engine sim, pytorch): local-sgd with 2 workers, 1.2 (1–1.5) s, "
            "1.75 times as fast as the next, allreduce with 2 workers, and 3.75 times as fast as serial with 1 worker."
        )

    def test_overlapping_runs_bear_no_difference_out(self) -> None:
        near = row("allreduce", 2, runs([1.4, 1.6, 1.8]))
        assert "(their runs overlap: no clear difference)" in tables.verdict(comparison(near, FAST))
        never = row("allreduce", 2, runs([1.6, 1.7, None]))
        assert "overlap" not in tables.verdict(comparison(never, FAST))

    def test_one_run_is_no_evidence(self) -> None:
        a, b = row("allreduce", 2, runs([2.0])), row("local-sgd", 2, runs([1.0]))
        assert "2.00 times as fast as the next, allreduce with 2 workers (one run each)" in tables.verdict(
            comparison(a, b)
        )

    def test_nobody_got_there(self) -> None:
        lost = row("hogwild", 2, runs([1.0, None, None]))
        assert tables.verdict(comparison(lost)) == "No strategy reached 0.5 in most of its runs."


def test_ranges_overlap_where_they_share_a_point() -> None:
    assert overlap([1, 3], [3, 4]) and overlap([2], [1, 3]) and not overlap([1, 2], [3, math.inf])


class TestTheSame:
    """One driver, one engine and one learning rate for all."""

    def compared(self, strategies: list[str], **settings: Any) -> list[tuple[str, str]]:
        task = tiny.task(48, model=dense, epochs=1)
        record = hocket.compare(task, strategies, workers=[2], seeds=1, progress=False, **settings)
        return [(r["engine"], r["driver"]) for r in record["rows"]]

    def test_compiled_where_all_can_be(self) -> None:
        assert self.compared(["serial", "hogwild", "mutex"]) == [("threads", "compiled")] * 3

    def test_pytorch_where_one_cannot(self) -> None:
        (found,) = set(self.compared(["serial", "hogwild", "allreduce"], engine="threads"))
        assert found == ("threads", "pytorch")

    def test_what_the_user_says_counts(self) -> None:
        assert set(self.compared(["serial", "hogwild"], engine="sim")) == {("sim", "pytorch")}
        assert set(self.compared(["serial", "hogwild"], driver="pytorch", engine="threads")) == {("threads", "pytorch")}

    def test_a_warning_where_one_rate_moves_the_model_by_different_amounts(self) -> None:
        mean = row("allreduce", 4, runs([1.0]))
        found = comparison(SLOW, mean)
        assert "serial 1, allreduce 0.25. Give each its own best rate with --tune lr." in found.warnings()[0]
        mean.spec = dataclasses.replace(mean.spec, scale_lr=True)
        assert not found.warnings(), "the linear rule makes up for it"

    def test_a_warning_where_checkpoints_make_workers_meet(self) -> None:
        rows = SLOW, row("server:mode=async", 4, runs([1.0])), row("mutex", 4, runs([1.0]))
        found = comparison(*rows)
        found.spec = dataclasses.replace(found.spec, checkpoint_every="2")
        assert found.warnings() == [
            "For every checkpoint all workers meet, which costs time where they else do not: server:mode=async, mutex. "
            "Leave it out."
        ]
        found.rows = [SLOW]
        assert not found.warnings()


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def test_each_at_its_own_best_rate(tmp_path: Path) -> None:
    """A mean of 4 gradients is a quarter of the step: what is too low a rate for it is so less for serial training."""
    settings: dict[str, Any] = dict(workers=[4], seeds=2, engine="sim", progress=False, epochs=3, lr=0.01)
    plain = hocket.compare("digits", ["serial", "allreduce"], **settings)
    strategies, tune = ["serial", "allreduce", "local-sgd"], ["lr", "every=2,8"]
    tuned = hocket.compare("digits", strategies, tune=tune, budget=3, out=tmp_path / "c", **settings)
    assert tuned == json.loads((tmp_path / "c/compare.json").read_text())
    for before, after in zip(plain["rows"], tuned["rows"], strict=False):
        assert before["tuned"] is None
        assert after["tuned"]["lr"] > 0.01 and min(after["test_metric"]) > max(before["test_metric"])
    every = [row["tuned"].get("every") for row in tuned["rows"]]
    assert every[:2] == [None, None] and every[2] is not None, "an option of one strategy is tuned there alone"
    spent = [row["tuning"]["samples"] for row in tuned["rows"]]
    assert max(spent) <= 1.15 * min(spent), "the same budget for each"
    used = {seed for r in tuned["rows"] for trial in r["tuning"]["trials"] for seed in trial["seeds"]}
    assert not used & set(tuned["seeds"])
