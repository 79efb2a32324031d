"""Whatever is killed, whenever: no process, no shared memory and no open door is left of a run."""

from __future__ import annotations

import ipaddress
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Marked, read_if_there
from covering import covering, first
from test_failures import children

from hocket.engines.catalogue import Listener, Program, engine
from hocket.engines.mpi import Mpi

STARTER = Path(__file__).parent / "starter.py"
LAUNCHER = Path(sys.executable).parent / "mpiexec"


class Waiting(Marked):
    """A run that only waits."""

    def __init__(self, name: str, **env: str) -> None:
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        super().__init__([sys.executable, STARTER, name, "2"], env, **pipes)

    def until(self, holds: Callable[[], object]) -> None:
        limit = time.monotonic() + 60
        while not holds():
            assert self.process.poll() is None and time.monotonic() < limit
            time.sleep(0.005)

    def until_it_runs(self) -> None:
        assert self.process.stdout is not None
        assert [self.process.stdout.readline() for _ in range(2)] == [b"here\n"] * 2

    def ends_after(self, number: int) -> None:
        """Kill the command alone; everything else must follow."""
        self.process.send_signal(number)
        self.process.wait()
        limit = time.monotonic() + 20
        while left := self.pids():
            assert time.monotonic() < limit, f"left behind: {left}"
            time.sleep(0.01)


@pytest.fixture
def command() -> Iterator[Callable[..., Waiting]]:
    started: list[Waiting] = []

    def start(name: str, **env: str) -> Waiting:
        started.append(Waiting(name, **env))
        return started[-1]

    yield start
    for one in started:
        for pid in one.pids():
            os.kill(pid, signal.SIGKILL)
        one.process.wait()


@pytest.mark.parametrize(("name", "number"), covering(["mpi", "torch"], [signal.SIGKILL, signal.SIGTERM]))
def test_a_command_that_is_killed_takes_everything_with_it(command: Any, name: str, number: int) -> None:
    run = command(name)
    run.until_it_runs()
    segments, guarded = run.segments(), run.pids()
    assert len(guarded) == 4  # the command, the guard and two ranks
    assert bool(segments) == (name == "mpi")
    run.ends_after(number)
    assert not [path for path in segments if path.exists()]


@pytest.mark.parametrize("delay", first(2, [0.02, 0.2, 0.0, 0.05, 0.1]))
def test_a_command_that_is_killed_while_mpi_starts_takes_everything_with_it(command: Any, delay: float) -> None:
    """There the ranks spin inside MPI_Init and hear nothing."""
    run = command("mpi")
    run.until(lambda: "libmpi" in run.maps())
    time.sleep(delay)
    segments = run.segments()
    run.ends_after(signal.SIGKILL)
    assert not [path for path in segments if path.exists()]


def test_a_launcher_of_the_users_own_goes_too(command: Any) -> None:
    before = set(Path("/tmp").glob("hydra_hwloc_xmlfile_*"))
    run = command("mpi", HOCKET_MPIEXEC=str(LAUNCHER))
    run.until_it_runs()
    segments, hardware = run.segments(), set(Path("/tmp").glob("hydra_hwloc_xmlfile_*")) - before
    assert len(run.pids()) == 6  # mpiexec and its proxy besides
    run.ends_after(signal.SIGKILL)
    assert not [path for path in segments if path.exists()]
    assert [path for path in hardware if not path.exists()]  # others may belong to runs beside this one


def test_two_runs_at_once_do_not_disturb_each_other(command: Any) -> None:
    first, second = command("mpi"), command("mpi")
    first.until_it_runs()
    second.until_it_runs()
    mine, kept = first.segments(), second.segments()
    assert mine and kept and not mine & kept
    first.ends_after(signal.SIGKILL)
    assert not [path for path in mine if path.exists()]
    assert len(second.pids()) == 4 and second.segments() == kept
    second.ends_after(signal.SIGTERM)
    assert not [path for path in kept if path.exists()]


def test_ranks_end_with_their_guard_and_the_next_one_sweeps(command: Any) -> None:
    run, beside = command("mpi"), command("mpi")
    run.until_it_runs()
    beside.until_it_runs()
    segments, kept = run.segments(), beside.segments()
    time.sleep(0.3)  # for the guard to have looked
    (guard,) = [pid for pid in run.pids() if "hocket.engines.guard" in read_if_there(f"/proc/{pid}/cmdline")]
    os.kill(guard, signal.SIGKILL)
    assert run.process.wait(30) != 0
    assert not run.pids()
    assert engine.make("mpi").run(Program("misbehave:counts", {"engine": "mpi"}), 1, Listener())
    assert not [path for path in segments if path.exists()]
    assert [path for path in kept if path.exists()] == list(kept)
    beside.ends_after(signal.SIGTERM)


def doors(pids: set[int]) -> set[str]:
    """The addresses on which processes listen."""
    sockets = {os.readlink(link) for pid in pids for link in _links(pid)}
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] in ("0A", "07") and f"socket:[{fields[9]}]" in sockets:
                raw = bytes.fromhex(fields[1].split(":")[0])
                words = [raw[i : i + 4][::-1] for i in range(0, len(raw), 4)]
                found.add(str(ipaddress.ip_address(b"".join(words))))
    return found


def _links(pid: int) -> list[str]:
    try:
        return [
            f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd") if os.path.islink(f"/proc/{pid}/fd/{fd}")
        ]
    except OSError:
        return []


@pytest.mark.parametrize("name", ["mpi", "torch"])
def test_a_run_on_one_machine_listens_on_loopback_alone(name: str) -> None:
    seen: set[str] = set()
    foreign = doors({os.getpid()})

    class Look(Listener):
        def hear(self, rank: int, kind: str, data: dict[str, Any], blob: bytes) -> None:
            seen.update(doors(children() | {os.getpid()}))

    engine.make(name).run(Program("misbehave:listens"), 2, Look())
    assert seen
    assert not {address for address in seen - foreign if not ipaddress.ip_address(address).is_loopback}


@pytest.mark.parametrize("hosts", ["-oProxyCommand=x", "a,-b:2", "a b", "a:4;b", ":3", "a:b"])
def test_hosts_that_are_no_names_are_refused(hosts: str) -> None:
    with pytest.raises(ValueError, match="write machines and their slots like a:4,b:4"):
        Mpi(hosts=hosts)
