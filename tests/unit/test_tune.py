"""Tuning: what is tried, what it may cost, and that the better half goes on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hocket
from hocket.app import cli
from hocket.core.errors import UserError
from hocket.lab import axes
from hocket.lab.tune import Tuning, plan, rungs
from hocket.run.progress import Silent
from hocket.run.spec import RunSpec
from hocket.run.train import prepare


def model() -> nn.Module:
    """Two layers: a rate that is far too high makes their product infinite."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


TASK = tiny.task(48, model=model, epochs=8, lr=0.1)


def grid(*texts: str, strategy: str = "local-sgd:every=4", workers: int = 2, **settings: Any) -> list[axes.Values]:
    training = prepare(RunSpec("", strategy=strategy, workers=workers, engine="sim", **settings), TASK)
    return axes.candidates(axes.read(texts, [strategy]), training)


def values(*texts: str, **settings: Any) -> list[Any]:
    return [next(iter(point.values())) for point in grid(*texts, **settings)]


class TestWhatIsTried:
    def test_rates_from_a_hundredth_to_ten_times_the_runs_own(self) -> None:
        assert values("lr") == [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]
        assert values("lr", lr=0.3)[0] == 0.003 and values("lr", lr=0.3)[-1] == 3.0

    def test_a_range_is_a_log_grid_with_both_ends(self) -> None:
        assert values("lr=0.03..1") == [0.03, 0.06, 0.15, 0.3, 0.6, 1.0]
        assert values("batch=3..24") == [3, 6, 12, 24]
        assert values("momentum=0.5..0.92") == [0.5, 0.8, 0.9, 0.92]

    def test_a_list_is_taken_as_it_stands(self) -> None:
        assert values("lr=0.5,0.1,0.5") == [0.5, 0.1]
        assert values("every=16,2") == [16, 2]
        with pytest.raises(UserError, match="values are too many"):
            values("lr=1e-310..1e300")

    def test_options_of_the_strategy(self) -> None:
        assert values("every") == [1, 2, 4, 8, 16]
        assert values("algorithm", strategy="allreduce") == ["auto", "native", "ring", "halving", "tree"]
        assert values("mode", strategy="server")[:2] == ["sync", "async"]

    def test_only_batches_that_a_shard_holds(self) -> None:
        assert values("batch") == [1, 2, 4, 8, 16]
        assert values("batch", workers=6) == [1, 2, 4, 8]

    def test_several_make_a_grid_and_of_a_large_one_a_sample(self) -> None:
        small = grid("lr=0.1,0.2", "every=2,4")
        assert small == [dict(lr=lr, every=every) for lr in (0.1, 0.2) for every in (2, 4)]
        large = grid("lr", "momentum")
        assert len(large) == axes.MOST_CANDIDATES and large == grid("lr", "momentum")
        assert large != grid("lr", "momentum", seed=1)

    def test_values_are_put_in(self) -> None:
        spec = RunSpec("digits", strategy="local-sgd:every=4,momentum=reset", lr=0.1)
        changed = axes.applied(spec, dict(lr=0.3, batch=8, every=16))
        assert (changed.lr, changed.batch, changed.strategy) == (0.3, 8, "local-sgd:every=16,momentum=reset")
        assert axes.applied(RunSpec("digits", strategy="allreduce"), dict(lr=0.3)).strategy == "allreduce"


@given(count=st.integers(2, 100), budget=st.floats(0.5, 50))
def test_no_rung_costs_more_than_its_share(count: int, budget: float) -> None:
    found = rungs(count, budget)
    assert found[0].candidates == count and found[-1].candidates == 2
    for rung, after in zip(found, [*found[1:], None], strict=True):
        cost = rung.candidates * rung.seeds * rung.part
        assert cost <= budget / len(found) * 1.0001
        assert cost >= budget / len(found) / 2, "nor is it left unspent: what is over makes for more seeds"
        assert after is None or (after.candidates == -(-rung.candidates // 2) and after.part >= rung.part)


@pytest.fixture(scope="module")
def tuned() -> Tuning:
    spec = RunSpec("", strategy="local-sgd:every=4", workers=2, engine="sim", seed=3)
    tuning = plan(spec, ["lr=0.0001,0.001,0.01,0.1,1,1e30"], 8, TASK)
    tuning.halve(Silent())
    return tuning


class TestHalving:
    def test_the_better_half_goes_on_and_who_diverged_does_not(self, tuned: Tuning) -> None:
        sizes = [sum(trial.rung == n for trial in tuned.trials) for n in (1, 2, 3)]
        assert sizes == [6, 3, 2]
        for n in (1, 2):
            here = [t for t in tuned.trials if t.rung == n and not t.runs.diverged]
            here.sort(key=lambda t: t.runs.order(False))
            on = {t.values["lr"] for t in tuned.trials if t.rung == n + 1}
            assert on == {t.values["lr"] for t in here[: len(on)]}
        (lost,) = [t for t in tuned.trials if t.runs.diverged]
        assert lost.values["lr"] == 1e30 and lost is tuned.ranking[-1]
        assert tuned.best == tuned.ranking[0].values and tuned.ranking[0].rung == 3

    def test_a_best_rate_at_the_end_of_the_grid_is_pointed_out(self, tuned: Tuning) -> None:
        assert not tuned.doubts()
        short = dataclasses.replace(tuned, grid=[v for v in tuned.grid if v["lr"] <= tuned.best["lr"]])
        assert short.doubts() == " (no higher lr was tried)"

    def test_a_budget_that_ends_before_full_length_is_pointed_out(self, tuned: Tuning) -> None:
        poor = dataclasses.replace(tuned, budget=1.0)
        assert poor.doubts() == " (no trial had more than 16.7% of the full length; --budget 6 would do)"
        assert not dataclasses.replace(tuned, budget=6.0).doubts()
        assert "more than 0.0167% of the full" in dataclasses.replace(tuned, budget=0.001).doubts()

    def test_it_costs_what_it_may(self, tuned: Tuning) -> None:
        whole = 8 * 48
        spent = sum(t.runs.samples for t in tuned.trials if not t.runs.diverged)
        assert 0.5 * tuned.budget * whole < spent <= 1.1 * tuned.budget * whole
        assert tuned.samples == spent + next(t.runs.samples for t in tuned.trials if t.runs.diverged)

    def test_seeds_of_its_own_the_same_for_all(self, tuned: Tuning) -> None:
        for n in (1, 2, 3):
            seeds = {tuple(r.seed for r in t.runs.results) for t in tuned.trials if t.rung == n and not t.runs.diverged}
            assert len(seeds) == 1 and min(seeds.pop()) == 1003


def test_a_simulated_tuning_repeats_itself() -> None:
    first, second = (
        hocket.tune(TASK, ["lr"], strategy="server:mode=async", engine="sim", workers=3, budget=2, progress=False)
        for _ in range(2)
    )
    for record in (first, second):
        del record["seconds"]
        for trial in record["trials"]:
            del trial["seconds"]
    assert first == second


def test_the_faster_to_the_target_wins_where_there_is_one() -> None:
    """0.02 and 0.2 both get there in the end."""
    task = tiny.task(48, epochs=30, target=0.9)
    found = hocket.tune(task, ["lr=0.002,0.02,0.2"], strategy="serial", engine="sim", progress=False)
    last = [t for t in found["trials"] if t["rung"] == 2]
    times = {t["values"]["lr"]: t["time_to_target"][0] for t in last}
    assert found["best"]["lr"] == min(times, key=lambda lr: times[lr] or 1e9) == 0.2


def test_when_all_diverge_nothing_is_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        cli.run(["tune", "digits", "-s", "serial", "--engine", "sim", "--epochs", "1", "--tune", "lr=1e30,1e31"]) == 1
    )
    told = capsys.readouterr()
    assert "every candidate diverged; give --tune lower values" in told.err
    assert told.out.count("diverged") == 2
    found = hocket.compare(
        TASK, ["serial"], tune=["lr=1e30,1e31"], engine="sim", workers=[1], seeds=1, budget=1, progress=False
    )
    assert found["rows"][0]["tuned"] is None and found["rows"][0]["verdicts"] == ["finished"], "it has its own rate"


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["-s", "local-sgd:every=8", "-n", "3", "--engine", "sim", "--sim", "compute=2ms", "--epochs", "2"]
    command = ["tune", "digits", *flags, "--tune", "lr=0.05,0.1", "--tune", "every=2,4", "--budget", "1"]
    assert cli.run([*command, "--out", "t"]) == 0
    *_, train, record = capsys.readouterr().out.strip().splitlines()
    assert record == "record: t"
    best = json.loads((tmp_path / "t/tune.json").read_text())["best"]
    strategy = f"local-sgd:every={best['every']}"
    assert train == (
        f"hocket train digits -s {strategy} -n 3 --engine sim --epochs 2 --lr {best['lr']} --sim compute=2ms"
    )
    assert cli.run([*train.split()[1:], "--out", "r", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["strategy"] == strategy
    assert cli.run([*command, "--out", "t", "--json"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert cli.run([*command, "--out", "t", "--json", "--force"]) == 0
    assert json.loads(capsys.readouterr().out)["best"] == best


@pytest.mark.parametrize(
    ("args", "fragment"),
    [
        (["--tune", "evry"], "did you mean every?"),
        (["--tune", "lr=2..1"], "nothing lies between 2 and 1"),
        (["--tune", "lr", "--budget", "-1"], "--budget must be"),
        (["--batch", "5000"], "batch 5000 is larger"),
        (["--out", "there"], "there exists already"),
    ],
)
def test_refused(
    args: list[str], fragment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    assert cli.run(["tune", "digits", "-s", "local-sgd", "--engine", "sim", *args]) == 2
    error = capsys.readouterr().err
    assert fragment in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert not list((tmp_path / "there").iterdir())


def test_ranks_of_a_launcher_cannot_agree_on_a_winner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them would go by its own clock."""
    monkeypatch.setattr("hocket.engines.mpi.Mpi.launched_by", lambda: "mpiexec")
    with pytest.raises(UserError, match="cannot be started by mpiexec"):
        plan(RunSpec("", engine="sim", workers=2), ["lr"], 8, TASK)
