"""Where the record of a run goes, and what is printed beside it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from refusals import TASKS, enter

from hocket.app import cli
from hocket.core.errors import UserError
from hocket.measure.folder import RunFolder
from hocket.run.place import new_folder

OLD = ["train", "digits", "--engine", "threads", "--steps", "2", "--out", "old", "--json"]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("args", "status"),
    [
        (["--mpiexec", "/nope", "--engine", "mpi"], 2),
        (["--mpiexec", "./fails", "--engine", "mpi"], 2),
        (["--batch", "5000"], 2),
    ],
)
def test_force_destroys_nothing_before_the_new_run_has_begun(
    args: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("fails").write_text("#!/bin/sh\nexit 1\n")
    Path("fails").chmod(0o755)
    assert cli.run(OLD) == 0
    before = {path: path.read_bytes() for path in Path("old").iterdir()}
    assert cli.run([*OLD, "--force", *args]) == status
    assert {path: path.read_bytes() for path in Path("old").iterdir()} == before


def test_two_runs_do_not_share_a_folder() -> None:
    first = RunFolder(Path("run"), "")
    with pytest.raises(UserError, match="a run is going on in run"):
        RunFolder(Path("run"), "", force=True)
    first.finish({})
    RunFolder(Path("run"), "", force=True).finish({})


def test_many_runs_at_once_get_folders_of_their_own() -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: new_folder("many"), range(24)))
    assert len(set(made)) == 24 and all(path.is_dir() for path in made)


def test_a_long_name_gets_a_folder_too() -> None:
    Path("n" * 240 + ".py").write_text(TASKS + "fine = task()\n")
    assert cli.run(["train", "n" * 240 + ".py:fine", "--epochs", "1", "--json"]) == 0
    assert len(list(Path("runs").iterdir())) == 1


def test_json_is_alone_on_standard_output_whatever_the_task_prints(capsys: pytest.CaptureFixture[str]) -> None:
    Path("prints.py").write_text(TASKS + "fine = task()\nprint('hello')\n")
    assert cli.run(["train", "prints.py:fine", "--epochs", "1", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["verdict"] == "finished" and "hello" in printed.err
