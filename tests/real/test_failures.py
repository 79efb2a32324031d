"""No call hangs: a rank that raises, dies or never arrives ends the run, named, and leaves no process behind."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from hocket.core.errors import RankFailed
from hocket.engines.catalogue import Listener, Program, engine

os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])

ALL = list(engine)
PROCESSES = ["mpi", "torch"]
REAL_TIME = ["mpi", "torch", "threads"]


def run(name: str, function: str, size: int = 3, deadline: float = 60.0, **argument: Any) -> list[Any]:
    options = "" if name == "sim" else f":deadline={deadline}"
    return engine.make(name + options).run(Program(f"misbehave:{function}", argument), size, Listener())


def children() -> set[int]:
    """Every process below this one."""
    parent = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found, todo = set(), {os.getpid()}
    while todo:
        todo = {pid for pid, up in parent.items() if up in todo} - found
        found |= todo
    return found


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Any:
    before = children()
    yield
    limit = time.monotonic() + 3
    while (left := children() - before) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not left, f"processes left behind: {left}"


@pytest.mark.parametrize("name", ALL)
def test_a_rank_that_raises_is_named_with_its_traceback(name: str) -> None:
    with pytest.raises(RankFailed) as caught:
        run(name, "raises")
    failure = caught.value
    assert failure.rank == 1
    assert failure.operation == "compute"
    assert "ZeroDivisionError: planted" in str(failure)
    assert "misbehave.py" in failure.traceback


@pytest.mark.parametrize("name", PROCESSES)
def test_a_killed_rank_is_named_at_once(name: str) -> None:
    with pytest.raises(RankFailed, match="died") as caught:
        run(name, "dies")
    assert caught.value.rank == 1
    assert "step 50" in caught.value.operation


@pytest.mark.parametrize("operation", ["recv", "all_reduce"])
@pytest.mark.parametrize("name", REAL_TIME)
def test_a_rank_that_never_arrives_ends_the_run_at_the_deadline(name: str, operation: str) -> None:
    with pytest.raises(RankFailed, match=r"waited 2\.0 s in " + operation) as caught:
        run(name, "never_arrives", deadline=2.0, operation=operation)
    assert caught.value.rank in (0, 2)
    assert operation in caught.value.traceback


def test_a_rank_that_never_starts_ends_the_run_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher is there but starts nothing."""
    fake = tmp_path / "mpiexec"
    fake.write_text("#!/bin/sh\ncase $1 in --version) echo HYDRA;; *) sleep 100;; esac\n")
    fake.chmod(0o755)
    monkeypatch.setenv("HOCKET_MPIEXEC", str(fake))
    began = time.monotonic()
    with pytest.raises(RankFailed, match="never arrived within 2 s"):
        run("mpi", "raises", deadline=2.0)
    assert time.monotonic() - began < 10


def test_a_launcher_that_fails_shows_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "mpiexec"
    fake.write_text("#!/bin/sh\ncase $1 in --version) echo HYDRA;; *) echo no slots; exit 7;; esac\n")
    fake.chmod(0o755)
    monkeypatch.setenv("HOCKET_MPIEXEC", str(fake))
    with pytest.raises(RankFailed, match="exit status 7") as caught:
        run("mpi", "raises")
    assert "no slots" in caught.value.traceback


def test_the_simulator_tells_who_waits_for_whom() -> None:
    with pytest.raises(RankFailed) as caught:
        run("sim", "deadlock")
    for rank, left in ((0, 2), (1, 0), (2, 1)):
        assert f"rank {rank} waits for rank {left} in recv(source={left}, tag=4)" in str(caught.value)


@pytest.mark.parametrize("name", ["mpi", "threads", "sim"])
def test_a_receive_may_give_up_by_itself(name: str) -> None:
    assert run(name, "waits_in_vain", size=2) == ["timed out", ""]
