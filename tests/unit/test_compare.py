"""`hocket compare`: turns, table and verdict."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import hocket
from hocket.app import cli
from hocket.lab.compare import Row, folders
from hocket.run.spec import RunSpec, read_toml, settings
from hocket.strategies import strategy


def test_it_takes_turns_and_says_who_won(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["compare", "digits", "-s", "serial", "-s", "allreduce", "--workers", "1,2", "--seeds", "2"]
    assert cli.run([*command, "--engine", "sim", "--epochs", "8", "--target", "0.8", "--out", "c"]) == 0
    printed = capsys.readouterr().out
    assert "Fastest to 0.8 here (engine sim, pytorch): allreduce with 2 workers" in printed
    assert "times as fast as the next, serial with 1 worker" in printed
    assert "every run stops at 0.8, or after 8 epochs" in printed
    rows = json.loads((tmp_path / "c/compare.json").read_text())["rows"]
    assert [(r["strategy"], r["workers"]) for r in rows] == [("serial", 1), ("allreduce", 1), ("allreduce", 2)]
    for row in rows:
        assert len(row["folders"]) == 2
        for folder in row["folders"]:
            curve = json.loads((Path(folder) / "result.json").read_text())["curve"]
            assert curve[0]["epoch"] == pytest.approx(0.2, abs=0.03), "five looks an epoch"


@pytest.mark.parametrize(
    ("args", "fragment"),
    [
        (["-s", "allreduce", "--workers", "two"], "--workers must be numbers"),
        (["-s", "allreduce", "--workers", "0"], "--workers must be numbers of 1 or more, such as 1,2,4; got 0"),
        (["-s", "allreduse"], "did you mean allreduce?"),
        (["-s", "gossip", "--workers", "1"], "none of these strategies runs"),
        (["-s", "local-sgd:every=0"], "must be 1 or more"),
        (["-s", "allreduce", "-n", "2,2"], "--workers 2 is given twice"),
        (["-s", "allreduce", "workers=3"], "give them as -s A -s B and -n 1,2"),
        (["-s", "allreduce", "strategy=serial"], "give them as -s A -s B and -n 1,2"),
        (["-s", "local-sgd", "-s", "serial", "-s", "local-sgd:every=8"], "--strategy local-sgd:every=8 is given twice"),
        (["-s", "allreduce", "--seeds", "0"], "--seeds must be 1 or more runs of each strategy, got 0"),
        (["-s", "allreduce", "--batch", "5000"], "batch 5000 is larger than a worker's shard"),
        (["-s", "serial", "-s", "allreduce", "--optimizer", "adm"], "did you mean adam?"),
        (["-s", "allreduce", "--steps", "2", "--epochs", "2"], "epochs or steps, not both"),
        (["-s", "allreduce", "--driver", "compiled"], "compiled workers run on engine threads, not on sim"),
        (["-s", "allreduce", "--tune", "lrr"], "did you mean lr?"),
        (
            ["-s", "allreduce", "-s", "serial", "--tune", "every"],
            "option of allreduce or serial, is called 'every'",
        ),
        (["-s", "allreduce", "--tune", "lr", "--tune", "lr=0.1,0.2"], "--tune lr is given twice"),
        (["-s", "allreduce", "--target", "2"], "target must be from 0 to 1, as accuracy is a share; got 2"),
        (
            ["-s", "server:mode=async", "-s", "serial", "--tune", "slack"],
            "--tune slack: slack has no effect with mode=async in server; leave it out",
        ),
        (["-s", "hogwild", "--tune", "backoff"], "--tune backoff: backoff has no effect in hogwild"),
        (["-s", "allreduce", "--tune", "lr=1..0.1"], "nothing lies between 1 and 0.1"),
        (["-s", "allreduce", "--tune", "lr="], "no values are given"),
        (["-s", "allreduce", "--tune", "lr=0..1"], "must begin above 0"),
        (["-s", "allreduce", "--tune", "lr=0.1"], "there must be two values or more"),
        (["-s", "allreduce", "--tune", "lr=0.1,-1"], "lr must be greater than 0"),
        (["-s", "allreduce", "--tune", "lr=0.1,high"], "--tune lr must be a number"),
        (["-s", "allreduce", "--tune", "batch=8,5000"], "batch 5000 is larger than a worker's shard"),
        (["-s", "local-sgd", "--tune", "every=0,4"], "must be 1 or more"),
        (["-s", "allreduce", "--tune", "algorithm=ring..native"], "are no numbers"),
        (["-s", "allreduce", "--tune", "momentum", "--optimizer", "adam"], "adam takes no momentum"),
        (["-s", "allreduce", "--tune", "lr", "--budget", "0"], "--budget must be"),
        (["-s", "allreduce", "--budget", "3"], "--budget is what tuning may cost"),
    ],
)
def test_refused(
    args: list[str], fragment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["compare", "digits", "--engine", "sim", *args]) == 2
    error = capsys.readouterr().err
    assert fragment in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_every_setting_of_train_is_one_of_compare_and_of_tune() -> None:
    assert set(settings("train")) - {"strategy", "workers"} == set(settings("compare"))
    assert set(settings("train")) == set(settings("tune"))


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"strategy": "allreduce"}, "give them as -s A -s B"),
        ({"strategies": [5]}, "strategies must be text; got 5"),
        ({"workers": 2.5}, "workers must be a whole number; got 2.5"),
        ({"workers": None}, "workers must be a whole number; got None"),
        ({"seeds": 2.5}, "seeds must be a whole number"),
        ({"tune": [5]}, "tune must be text"),
        ({"budget": "much"}, "budget must be a number; got 'much'"),
    ],
)
def test_refused_in_python(given: dict[str, Any], line: str) -> None:
    settings: dict[str, Any] = {"strategies": ["serial"], "engine": "sim", "progress": False}
    with pytest.raises(hocket.UserError, match=line):
        hocket.compare("digits", **settings | given)


def test_a_runs_own_file_has_the_other_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The strategies and the numbers of workers are those of the comparison."""
    monkeypatch.chdir(tmp_path)
    settings = ["--engine", "sim", "--steps", "3", "--batch", "8"]
    assert cli.run(["train", "digits", "-s", "local-sgd", "-n", "3", *settings, "--out", "run"]) == 0
    capsys.readouterr()
    command = ["compare", "--spec", "run/spec.toml", "-s", "serial", "-s", "allreduce", "--seeds", "1", "--json"]
    assert cli.run(command) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["strategy"], row["workers"]) for row in rows] == [("serial", 1), ("allreduce", 2)]
    spec = read_toml(Path(rows[1]["folders"][0]) / "spec.toml")
    assert (spec["steps"], spec["batch"]) == (3, 8)


def test_every_row_has_folders_of_its_own() -> None:
    """Whatever its strategy is called: one run must not replace another's."""
    long = "local-sgd:" + "x" * 200
    names = ["a/own.py:mine", "b/own.py:mine", "own.py:mine:kind=a1", "own.py:mine:kinda=1", long + "1", long + "2"]
    made = folders([Row(RunSpec("digits", strategy=name, workers=n)) for name in names for n in (2, 4)])
    assert len(set(made)) == len(made) == 12
    assert made[0] == "own.py-mine-2" and max(map(len, made)) < 150


OWN = """
import dataclasses, torch, hocket
from hocket.core.worker import Strategy
from hocket.strategies import strategy

@strategy("alone-together")
@dataclasses.dataclass(frozen=True)
class AloneTogether(Strategy):
    \"\"\"Everyone for himself.\"\"\"

    def worker(self, w):
        while (g := (yield)) is not None:
            w.descend(g)
        w.average_replicas(1.0)

print("hello")
x = torch.randn(64, 2)
task = hocket.Task(model=lambda: torch.nn.Linear(2, 2), data=((x, (x[:, 0] > 0).long()),) * 2, batch=4)
"""


def test_the_users_own_strategy_and_the_flags_of_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(strategy, "_classes", dict(strategy._classes))  # other tests go over all there are
    (tmp_path / "own.py").write_text(OWN)
    command = ["compare", "own.py:task", "-s", "alone-together", "-s", "serial", "--seeds", "1", "--engine", "threads"]
    flags = ["--optimizer", "adam", "--lr", "0.01", "--steps", "5", "--trace", "0", "--out", "c", "--json"]
    for force in ([], ["--force"]):
        assert cli.run([*command, *flags, *force]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed == json.loads((tmp_path / "c/compare.json").read_text())
        assert [(row["strategy"], row["workers"]) for row in printed["rows"]] == [("alone-together", 2), ("serial", 1)]
        for row in printed["rows"]:
            spec = read_toml(Path(row["folders"][0]) / "spec.toml")
            assert (spec["optimizer"], spec["steps"], spec["trace"]) == ("adam", 5, 0)
    assert cli.run([*command, *flags]) == 2, "a folder that exists"
