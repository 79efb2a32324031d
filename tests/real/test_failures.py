"""No call hangs: a rank that raises, dies or never arrives ends the run, named, and leaves no process behind."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from covering import covering, first

from hocket.core.errors import RankFailed, UserError
from hocket.engines import supervisor
from hocket.engines.catalogue import Listener, Program, engine
from hocket.engines.engine import first_failure
from hocket.kernels.memory import block

os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])

PROCESSES = ["mpi", "torch"]
LAUNCHER = str(Path(sys.executable).parent / "mpiexec")
REAL_TIME = ["mpi", "torch", "threads"]


def run(name: str, function: str, size: int = 3, deadline: float = 60.0, **argument: Any) -> list[Any]:
    options = "" if name == "sim" else f"{',' if ':' in name else ':'}deadline={deadline}"
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
    limit = time.monotonic() + 20
    while (left := children() - before) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not left, f"processes left behind: {left}"


@pytest.mark.parametrize("name", first(3, ["sim", "threads", "mpi", "torch"]))
def test_a_rank_that_raises_is_named_with_its_traceback(name: str) -> None:
    with pytest.raises(RankFailed) as caught:
        run(name, "raises")
    failure = caught.value
    assert failure.rank == 1
    assert failure.operation == "compute"
    assert "ZeroDivisionError: planted" in str(failure)
    assert "misbehave.py" in failure.traceback


@pytest.mark.parametrize("name", first(1, PROCESSES))
def test_a_killed_rank_is_named_at_once(name: str) -> None:
    with pytest.raises(RankFailed, match="died: killed by SIGKILL") as caught:
        run(name, "dies")
    assert caught.value.rank == 1
    assert "step 50" in caught.value.operation


@pytest.mark.parametrize(("name", "operation"), covering(REAL_TIME, ["recv", "all_reduce"]))
def test_a_rank_that_never_arrives_ends_the_run_at_the_deadline(name: str, operation: str) -> None:
    flag = "" if name == "threads" else ".*--deadline"
    with pytest.raises(RankFailed, match=rf"waited 4\.0 s in {operation}{flag}") as caught:
        run(name, "never_arrives", deadline=4.0, operation=operation)
    assert caught.value.rank in (0, 2)
    assert operation in caught.value.traceback


def test_a_rank_that_never_starts_ends_the_run_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher is there but starts nothing."""
    fake = tmp_path / "mpiexec"
    fake.write_text("#!/bin/sh\ncase $1 in --version) echo HYDRA;; *) sleep 100;; esac\n")
    fake.chmod(0o755)
    monkeypatch.setenv("HOCKET_MPIEXEC", str(fake))
    began = time.monotonic()
    with pytest.raises(RankFailed, match=r"never arrived within 2 s of the start; .*--deadline"):
        run("mpi", "raises", deadline=2.0)
    assert time.monotonic() - began < 30


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


@pytest.mark.parametrize("name", first(1, PROCESSES))
def test_a_stopped_rank_for_which_nobody_waits_is_named_at_the_deadline(name: str) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed, match=r"no sign of life for 3 s.*--deadline") as caught:
        run(name, "falls_silent", size=2, deadline=3.0)
    assert caught.value.rank == 1
    assert caught.value.operation == "compute (step 2)"
    assert time.monotonic() - began < 30


def test_a_rank_that_computes_for_long_without_reporting_is_alive() -> None:
    silent, busy = run("mpi", "holds_the_lock", size=2, deadline=3.0, seconds=6.0)
    assert silent == 0 and busy > 0


@pytest.mark.parametrize("name", first(1, ["torch", "mpi"]))
def test_a_dead_rank_is_noticed_though_its_child_lives(name: str) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed, match="died: killed by SIGKILL") as caught:
        run(name, "dies_after_a_fork", size=2)
    assert caught.value.rank == 1
    assert time.monotonic() - began < 30


def test_a_rank_that_leaves_without_a_word_is_named_with_its_status() -> None:
    with pytest.raises(RankFailed, match="died: exit status 3") as caught:
        run("mpi", "ends_early", size=2)
    assert caught.value.rank == 1


@pytest.mark.parametrize(("name", "launcher"), first(1, [("mpi", LAUNCHER), ("torch", ""), ("mpi", "")]))
def test_a_killed_worker_is_not_blamed_on_the_server(name: str, launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOCKET_MPIEXEC", launcher)
    with pytest.raises(RankFailed, match="died") as caught:
        run(name, "serves", deadline=20.0)
    assert caught.value.rank == 2


def test_a_death_explains_what_others_say_of_it() -> None:
    late = RankFailed(0, "recv", "DeadlineExceeded: rank 0 waited")
    echo = RankFailed(0, "recv", "CommError: rank 0 in recv with rank 2: Other MPI error")
    death = RankFailed(2, "compute", "its process (pid 7 on a) died: killed by SIGKILL")
    assert first_failure([late, echo, death]) is death
    assert first_failure([echo, late]) is late


@cache
def healthy(name: str) -> list[dict[str, Any]]:
    """What each rank found where nothing goes wrong: one start of the ranks for all that is looked at."""
    return run(name, "healthy", engine=name, thousands=6)


@pytest.mark.parametrize("name", PROCESSES)
def test_messages_that_nobody_waits_for_are_not_kept(name: str) -> None:
    most, *seconds = healthy(name)[0]["sends_much"]
    assert most <= 2 * 64 + 2 if name == "torch" else most < 6000
    assert min(seconds[3:]) < 3 * min(seconds[:3])  # it does not slow down


@pytest.mark.parametrize("name", PROCESSES)
def test_a_request_may_be_waited_for_late_and_twice(name: str) -> None:
    assert [rank["waits_for_what_was_sent"] for rank in healthy(name)] == [300, 0, 0]


@pytest.mark.parametrize("name", PROCESSES)
def test_every_counter_begins_at_0(name: str) -> None:
    ranks = [rank["counts"] for rank in healthy(name)]
    for connection in range(3):
        taken = [taken[connection] for taken in ranks]
        starts = sorted((first, 1) for first, _, _ in taken)
        starts = sorted(starts + [(second, 3) for _, second, _ in taken] + [(third, 1) for _, _, third in taken])
        assert starts[0][0] == 0
        assert all(at + count == after for (at, count), (after, _) in itertools.pairwise(starts))
        assert sum(starts[-1]) == 15


@pytest.mark.parametrize("name", PROCESSES)
def test_collectives_take_tensors_that_must_be_copied_first(name: str) -> None:
    means, sums = [1.0, 2.0, 3.0], [0.0, 3.0, 6.0]
    expected = [[means, [1.0], [sums[r]], [0.0, 1.0, 2.0]] for r in range(3)]
    assert [rank["collects"] for rank in healthy(name)] == expected


class Interrupt(Listener):
    """Presses Ctrl-C once all ranks have begun, and again after some seconds."""

    def __init__(self, ranks: int, again: float | None = None) -> None:
        self.missing, self.again = ranks, again
        self.pressed = 0.0

    def hear(self, rank: int, kind: str, data: dict[str, Any], blob: bytes) -> None:
        if kind == "began":
            self.missing -= 1
            if not self.missing:
                self.pressed = time.monotonic() + 0.5
                for after in (0.5, *([self.again] if self.again else [])):
                    threading.Timer(after, os.kill, [os.getpid(), signal.SIGINT]).start()


@pytest.mark.parametrize("name", first(1, PROCESSES))
def test_ranks_that_are_interrupted_stop_after_the_same_step(name: str) -> None:
    stopped = engine.make(name).run(Program("misbehave:works"), 3, Interrupt(3))
    (step, total), *others = stopped
    assert others == [[step, total]] * 2
    assert step > 5 and total == 3 * step


def test_a_second_interrupt_ends_a_run_that_does_not_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "STOP_S", 100.0)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        engine.make("mpi").run(Program("misbehave:gets_stuck", {"steps": 5}), 2, Interrupt(2, again=1.5))
    assert time.monotonic() - began < 60


def test_a_run_that_does_not_stop_in_time_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "STOP_S", 2.0)
    listener = Interrupt(2)
    with pytest.raises(KeyboardInterrupt):
        engine.make("mpi").run(Program("misbehave:gets_stuck", {"steps": 5}), 2, listener)
    assert 1.5 < time.monotonic() - listener.pressed < 30  # the program waits for 300


def test_a_program_that_never_asks_whether_to_stop_is_ended_at_once() -> None:
    listener = Interrupt(2)
    with pytest.raises(KeyboardInterrupt):
        engine.make("mpi").run(Program("misbehave:gets_stuck", {"steps": 0}), 2, listener)
    assert time.monotonic() - listener.pressed < supervisor.STOP_S


def test_an_interrupt_before_the_run_has_begun_ends_it_at_once() -> None:
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run("mpi", "works")
    assert time.monotonic() - began < 30


def test_more_ranks_than_cores_have_longer_to_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert supervisor.start_limit(2, 60.0) == supervisor.start_limit(2, 5.0) == 60.0
    assert supervisor.start_limit(64, 60.0) == 320.0
    assert supervisor.start_limit(64, 900.0) == 900.0


def test_a_launcher_that_is_none_is_refused(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("#!/bin/sh\necho I launch nothing\n")
    for what, chosen, said in (
        ("missing", tmp_path / "nothing", "cannot find"),
        ("a folder", tmp_path, "cannot find"),
        ("not executable", plain, "cannot find"),
        ("no launcher", shutil.which("ls"), "is no MPI launcher"),
    ):
        with pytest.raises(UserError, match=said) as caught:
            run(f"mpi:mpiexec={chosen}", "raises")
        assert "--mpiexec" in str(caught.value) and "\n" not in str(caught.value), what
    plain.chmod(0o755)
    with pytest.raises(UserError, match="is no MPI launcher"):
        run(f"mpi:mpiexec={plain}", "raises")


def test_ranks_that_mpi_would_find_no_memory_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block, "free", lambda: 4_000_000)
    engine.make("mpi").check(2)
    with pytest.raises(UserError, match=r"5 ranks want 7.5 MB of shared memory, .* 4.0 MB free; .* --shm-size"):
        engine.make("mpi").check(5)


ABORTED = """
import os, signal
import hocket
from hocket.engines.guard import segments_of
from mpi4py import MPI
names = segments_of(os.getpid())
with hocket.join() as team:
    team.barrier()
    if team.rank == 1:
        print(*names, flush=True)
        {ending}
    team.barrier()
"""


@pytest.mark.parametrize("ending", ["raise hocket.UserError('no more')", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_an_early_end_under_mpiexec_leaves_nothing_in_shared_memory(tmp_path: Path, ending: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(ABORTED.format(ending=ending))
    done = subprocess.run([LAUNCHER, "-n", "2", sys.executable, script], capture_output=True, text=True, timeout=60)
    names = [name for name in done.stdout.split() if name.startswith("mpich")]
    assert done.returncode and names
    assert not [name for name in names if Path("/dev/shm", name).exists()]
