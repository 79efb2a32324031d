"""A run's folder: nothing half written, no two runs mixed, nothing lost that was there before."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hocket.core.errors import UserError
from hocket.measure import folder as module
from hocket.measure.folder import RunFolder

POINT = {"step": 1, "epoch": 1.0, "seconds": 0.5, "train_loss": None, "test_loss": 0.25, "test_accuracy": 0.75}


def finished(path: Path, name: str, **options: bool) -> RunFolder:
    """A run that wrote its name everywhere."""
    run = RunFolder(path, name, **options)
    run.event(0, {"event": name})
    run.point(POINT)
    run.checkpoint("one", name.encode())
    run.model(name.encode())
    assert run.finish({"name": name}) is None
    return run


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


ALL = ["checkpoints", "curve.csv", "events.jsonl", "model.safetensors", "result.json", "spec.toml"]


def whose(path: Path) -> set[str]:
    """The runs that wrote what is in the folder."""
    found = {(path / "spec.toml").read_text()}
    found |= {json.loads(line)["event"] for line in (path / "events.jsonl").read_text().splitlines()}
    for file in (path / "model.safetensors", path / "checkpoints/one"):
        if file.exists():
            found.add(file.read_text())
    if (path / "result.json").exists():
        found.add(json.loads((path / "result.json").read_text())["name"])
    return found


def steps(path: Path) -> list[int]:
    lines = (path / "curve.csv").read_text().splitlines()
    assert not lines or lines[0] == ",".join(POINT)
    return [int(line.split(",")[0]) for line in lines[1:]]


def test_a_run_leaves_its_files_and_nothing_else(tmp_path: Path) -> None:
    finished(tmp_path / "a/run", "new")
    assert names(tmp_path / "a/run") == ALL and names(tmp_path / "a") == ["run"]
    assert whose(tmp_path / "a/run") == {"new"}
    assert (tmp_path / "a/run/curve.csv").read_text().splitlines()[1] == "1,1.0,0.5,,0.25,0.75"


class TestForce:
    @pytest.fixture
    def old(self, tmp_path: Path) -> Path:
        finished(tmp_path / "run", "old")
        (tmp_path / "run/notes.txt").write_text("mine")
        return tmp_path / "run"

    def test_without_it_a_folder_is_refused(self, old: Path) -> None:
        with pytest.raises(UserError, match="exists already; choose another --out, or replace the run"):
            RunFolder(old, "new")
        assert whose(old) == {"old"}

    def test_it_replaces_the_run_and_keeps_the_rest(self, old: Path) -> None:
        finished(old, "new", force=True)
        assert whose(old) == {"new"} and names(old) == sorted([*ALL, "notes.txt"])

    @pytest.mark.parametrize("end", ["finish", "discard"])
    def test_a_run_that_never_began_replaces_nothing(self, old: Path, end: str) -> None:
        run = RunFolder(old, "new", force=True)
        assert whose(old) == {"old"}
        run.finish({"name": "new"}) if end == "finish" else run.discard()
        assert whose(old) == {"old"} and names(old) == sorted([*ALL, "notes.txt"])

    def test_a_run_that_never_began_leaves_no_new_folder(self, tmp_path: Path) -> None:
        RunFolder(tmp_path / "run", "new").discard()
        assert names(tmp_path) == []

    @pytest.mark.parametrize("first", ["start", "event", "point", "model", "checkpoint"])
    def test_the_old_run_goes_when_the_new_one_begins(self, old: Path, first: str) -> None:
        run = RunFolder(old, "new", force=True)
        match first:
            case "start":
                run.start()
            case "event":
                run.event(0, {"event": "new"})
            case "point":
                run.point(POINT)
            case "model":
                run.model(b"new")
            case "checkpoint":
                run.checkpoint("one", b"new")
        assert whose(old) == {"new"}

    @pytest.mark.parametrize("crash_at", range(12))
    def test_a_kill_within_the_swap_leaves_one_run_whole(
        self, old: Path, crash_at: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = RunFolder(old, "new", force=True)
        calls = iter(range(99))

        def replace(source: Path, to: Path) -> None:
            if next(calls) == crash_at:
                raise KeyboardInterrupt
            os.rename(source, to)

        with monkeypatch.context() as patch:
            patch.setattr(module.os, "replace", replace)
            try:
                run.start()
                crashed = False
            except KeyboardInterrupt:
                crashed = True
        assert crashed == (crash_at < len(ALL) + 3), "6 files go, 3 come"
        assert run._lock is not None
        run._lock.close()
        RunFolder(old, "x", resumed=True).discard()
        assert whose(old) == ({"old"} if crash_at <= len(ALL) else {"new"})
        assert {".old", ".new", ".lock"}.isdisjoint(names(old))
        if crash_at <= len(ALL):
            assert names(old) == sorted([*ALL, "notes.txt"])


class TestLiveRuns:
    @pytest.mark.parametrize("options", [{"force": True}, {"resumed": True}])
    def test_are_refused_whatever_the_user_says(self, tmp_path: Path, options: dict[str, bool]) -> None:
        run = RunFolder(tmp_path / "run", "first")
        run.event(0, {"event": "first"})
        with pytest.raises(UserError, match="a run is going on in"):
            RunFolder(tmp_path / "run", "second", **options)
        run.event(0, {"event": "first"})
        assert run.finish({"name": "first"}) is None
        assert whose(tmp_path / "run") == {"first"}
        finished(tmp_path / "run", "second", **options)

    def test_also_those_of_other_processes_until_they_die(self, tmp_path: Path) -> None:
        script = (
            "import pathlib, sys, time; from hocket.measure.folder import RunFolder\n"
            "run = RunFolder(pathlib.Path(sys.argv[1]), 'other'); print('ready', flush=True); time.sleep(60)"
        )
        other = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "run")], stdout=subprocess.PIPE)
        try:
            assert other.stdout is not None and other.stdout.readline() == b"ready\n"
            with pytest.raises(UserError, match="a run is going on in"):
                RunFolder(tmp_path / "run", "second", force=True)
        finally:
            other.kill()
            other.wait()
        finished(tmp_path / "run", "second", force=True)
        assert whose(tmp_path / "run") == {"second"}


class TestResumed:
    def test_goes_on_where_the_curve_and_the_events_are(self, tmp_path: Path) -> None:
        run = RunFolder(tmp_path, "spec", force=True)
        for step in range(1, 6):
            run.event(0, {"event": "spec"})
            run.point(POINT | {"step": step, "epoch": float(step)})
        run.finish({"name": "spec"})
        again = RunFolder(tmp_path, "more", resumed=True)
        again.rewind(3)
        assert steps(tmp_path) == [1, 2, 3, 4, 5], "until it begins"
        again.point(POINT | {"step": 4, "epoch": 4.0, "seconds": 9.0})
        again.event(1, {"event": "spec"})
        assert steps(tmp_path) == [1, 2, 3, 4]
        assert (tmp_path / "curve.csv").read_text().splitlines()[-1].startswith("4,4.0,9.0")
        assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 6
        assert (tmp_path / "spec.toml").read_text() == "more"
        assert not (tmp_path / "result.json").exists(), "there is a result where a run has ended"
        again.finish({"name": "more"})
        assert json.loads((tmp_path / "result.json").read_text()) == {"name": "more"}

    def test_half_lines_and_half_files_of_a_killed_run_go(self, tmp_path: Path) -> None:
        finished(tmp_path / "run", "spec")
        with (tmp_path / "run/curve.csv").open("a") as curve, (tmp_path / "run/events.jsonl").open("a") as events:
            curve.write("2,2.0")
            events.write('{"rank"')
        for part in ("result.json.part", "checkpoints/two.part"):
            (tmp_path / "run" / part).write_text("half")
        again = RunFolder(tmp_path / "run", "spec", resumed=True)
        again.rewind(2)
        again.point(POINT | {"step": 3, "epoch": 3.0})
        again.event(0, {"event": "spec"})
        again.finish({"name": "spec"})
        assert steps(tmp_path / "run") == [1, 3]
        assert whose(tmp_path / "run") == {"spec"}
        assert names(tmp_path / "run") == ALL and names(tmp_path / "run/checkpoints") == ["one"]

    def test_a_run_that_was_killed_before_its_first_point(self, tmp_path: Path) -> None:
        RunFolder(tmp_path / "run", "spec")._close()
        again = RunFolder(tmp_path / "run", "spec", resumed=True)
        again.rewind(0)
        again.point(POINT)
        assert steps(tmp_path / "run") == [1]

    @pytest.mark.parametrize("what", ["nothing", "file", "empty"])
    def test_without_a_run_there_is_nothing_to_resume(self, tmp_path: Path, what: str) -> None:
        path = tmp_path / what
        if what == "file":
            path.touch()
        if what == "empty":
            path.mkdir()
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(UserError, match="there is no run"):
            RunFolder(path, "spec", resumed=True)
        assert sorted(tmp_path.rglob("*")) == before


def test_the_newest_two_checkpoints_are_kept(tmp_path: Path) -> None:
    run, place = RunFolder(tmp_path / "run", "spec"), tmp_path / "run/checkpoints"
    for step in (8, 9, 10, 11):
        run.checkpoint(f"step-{step}", str(step).encode())
        assert f"step-{step}" in names(place)
    assert {p.name: p.read_text() for p in place.iterdir()} == {"step-10": "10", "step-11": "11"}
    run.checkpoint("step-9", b"again")  # as a run does that went back
    assert (place / "step-9").read_text() == "again" and len(names(place)) == 2


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Files end at this size, as they do where a disk is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class TestFullDisk:
    def test_training_goes_on_and_the_end_says_what_is_missing(self, tmp_path: Path) -> None:
        run = RunFolder(tmp_path / "run", "spec")
        run.checkpoint("one", b"small")
        with largest_file(500):
            for step in range(100):
                run.event(0, {"event": "e" * 20, "step": step})
                run.point(POINT | {"step": step, "epoch": float(step)})
            run.checkpoint("two", bytes(1000))
            run.model(bytes(1000))
            line = run.finish({"name": "spec"})
        assert line is not None and "\n" not in line
        missing = "events.jsonl, curve.csv, checkpoints, model.safetensors"
        assert f"could not write {missing} to {tmp_path / 'run'}: File too large; the disk at /" in line
        assert "MB free" in line
        assert names(tmp_path / "run") == ["checkpoints", "curve.csv", "events.jsonl", "result.json", "spec.toml"]
        assert names(tmp_path / "run/checkpoints") == ["one"], "the last one that was whole"
        record = json.loads((tmp_path / "run/result.json").read_text())
        assert record["not_written"]["events.jsonl"] == "File too large" and len(record["not_written"]) == 4
        events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
        assert [e["step"] for e in events] == list(range(len(events))) and 3 < len(events) < 10
        assert steps(tmp_path / "run") == list(range(len(steps(tmp_path / "run"))))

    def test_the_events_make_room_for_the_result(self, tmp_path: Path) -> None:
        run = RunFolder(tmp_path / "run", "spec")
        with largest_file(40_000):
            for step in range(2000):
                run.event(0, {"event": "e" * 20, "step": step})
        size = (tmp_path / "run/events.jsonl").stat().st_size
        assert 19_000 < size < 20_000, "half of it is given back, and no line is cut in two"
        last = (tmp_path / "run/events.jsonl").read_text().splitlines()[-1]
        assert json.loads(last)["rank"] == 0
        line = run.finish({"name": "spec"})
        assert line is not None and line.startswith("could not write events.jsonl to")

    def test_the_result_itself(self, tmp_path: Path) -> None:
        run = RunFolder(tmp_path / "run", "spec")
        with largest_file(10):
            line = run.finish({"name": "a long name"})
        assert line is not None and "could not write result.json" in line
        assert names(tmp_path / "run") == ["curve.csv", "events.jsonl", "spec.toml"]

    def test_at_the_start_it_is_the_users_to_choose_another_place(self, tmp_path: Path) -> None:
        finished(tmp_path / "old", "old")
        with largest_file(10):
            for path, force in ((tmp_path / "new", False), (tmp_path / "old", True)):
                with pytest.raises(UserError, match=f"cannot write to {path}: File too large; choose another --out"):
                    RunFolder(path, "a long spec", force=force)
        assert names(tmp_path) == ["old"] and whose(tmp_path / "old") == {"old"} and names(tmp_path / "old") == ALL

    def test_what_failed_once_may_succeed_later(self, tmp_path: Path) -> None:
        run = RunFolder(tmp_path / "run", "spec")
        with largest_file(10):
            run.model(bytes(1000))
        run.model(bytes(1000))
        assert run.finish({"name": "spec"}) is None


WRITER = """
import pathlib, sys
from hocket.measure.folder import RunFolder
path = pathlib.Path(sys.argv[1])
print("ready", flush=True)
for k in range(10**6):
    run = RunFolder(path, f"{k}", force=True)
    run.event(0, {"event": f"{k}"})
    for step in range(3):
        run.checkpoint("one", f"{k}".encode() * 5000)
        run.model(f"{k}".encode() * 5000)
    run.finish({"name": f"{k}"})
"""


def test_kills_at_any_moment_leave_whole_files_of_one_run(tmp_path: Path) -> None:
    rng = random.Random(0)
    for _ in range(12):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "run")], stdout=subprocess.PIPE)
        assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        time.sleep(rng.uniform(0.0, 0.1))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        if not (tmp_path / "run").exists():
            continue
        try:
            RunFolder(tmp_path / "run", "x", resumed=True).discard()
        except UserError as error:
            assert "no run in" in str(error)  # killed before its first file
            continue
        run = (tmp_path / "run/spec.toml").read_text()
        for file in (tmp_path / "run/model.safetensors", tmp_path / "run/checkpoints/one"):
            assert not file.exists() or file.read_text() == run * 5000
        assert {json.loads(line)["event"] for line in (tmp_path / "run/events.jsonl").read_text().splitlines()} <= {run}
        if (tmp_path / "run/result.json").exists():
            assert json.loads((tmp_path / "run/result.json").read_text()) == {"name": run}
