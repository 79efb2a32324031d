"""`hocket compare`: turns, table and verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hocket.app import cli


def test_it_takes_turns_and_says_who_won(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["compare", "digits", "-s", "serial", "-s", "allreduce", "--workers", "1,2", "--seeds", "2"]
    assert cli.run([*command, "--engine", "sim", "--epochs", "8", "--target", "0.8", "--out", "c"]) == 0
    printed = capsys.readouterr().out
    assert "Fastest to 0.8 here: allreduce with 2 workers" in printed
    assert "times as fast as serial" in printed
    rows = json.loads((tmp_path / "c/compare.json").read_text())["rows"]
    assert [(r["strategy"], r["workers"]) for r in rows] == [("serial", 1), ("allreduce", 1), ("allreduce", 2)]
    for row in rows:
        assert len(row["folders"]) == 2
        for folder in row["folders"]:
            assert (Path(folder) / "result.json").exists()


@pytest.mark.parametrize(
    ("args", "fragment"),
    [
        (["-s", "allreduce", "--workers", "two"], "--workers must be numbers"),
        (["-s", "allreduce", "--workers", "0"], "must be 1 or more"),
        (["-s", "allreduse"], "did you mean allreduce?"),
        (["-s", "gossip", "--workers", "1"], "none of these strategies runs"),
        (["-s", "local-sgd:every=0"], "must be 1 or more"),
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
