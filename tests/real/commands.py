"""The command `hocket` in processes of its own, and all that belongs to them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

HOCKET = [sys.executable, "-m", "hocket"]
TASKS = Path(__file__).parent / "saving.py"


class Marked:
    """A command, and all processes that belong to it: they are known by a mark in their environment."""

    def __init__(self, argv: Sequence[str | Path], env: Mapping[str, str], **pipes: Any) -> None:
        self.mark = f"HOCKET_TEST_COMMAND={time.monotonic_ns()}"
        marked = os.environ | env | dict([self.mark.split("=")])
        self.process = subprocess.Popen([str(word) for word in argv], env=marked, **pipes)

    def pids(self) -> set[int]:
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    dead = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                    if not dead and self.mark.encode() in (entry / "environ").read_bytes():
                        found.add(int(entry.name))
                except OSError:
                    continue
        return found

    def maps(self) -> str:
        """What its processes have mapped."""
        return "".join(read_if_there(f"/proc/{pid}/maps") for pid in self.pids())

    def segments(self) -> set[Path]:
        """The files in /dev/shm among that."""
        lines = [line for line in self.maps().splitlines() if not line.endswith("(deleted)")]
        return {Path(line[line.index("/dev/shm/") :]) for line in lines if "/dev/shm/" in line}


class Command(Marked):
    """A command in a session of its own."""

    def __init__(self, *argv: str | Path, **env: str) -> None:
        nothing = subprocess.DEVNULL
        pipes = dict(stdin=nothing, stdout=nothing, stderr=subprocess.PIPE)
        super().__init__(argv, env, text=True, start_new_session=True, **pipes)

    def until(self, holds: Callable[[], object], limit_s: float = 90) -> bool:
        """Wait for something; False if the command has ended before."""
        limit = time.monotonic() + limit_s
        while not holds():
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < limit
            time.sleep(0.001)
        return True

    def end(self, limit_s: float = 120) -> tuple[int, str]:
        """Its exit status, and what it said; nothing of it may be left."""
        try:
            _, said = self.process.communicate(timeout=limit_s)
        finally:
            self.kill()
        return self.process.returncode, said

    def kill(self) -> None:
        """End all of it at once, its guard too, and remove from /dev/shm what only that could have removed."""
        pids = self.pids()
        _send(pids, signal.SIGSTOP)
        left = self.segments() | {Path(name) for pid in pids if (name := _environment(pid).get("UCX_POSIX_DIR"))}
        _send(self.pids(), signal.SIGKILL)
        self.process.wait()
        for path in left:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def gone(self, limit_s: float = 20) -> bool:
        """Whether all of it ends by itself soon."""
        limit = time.monotonic() + limit_s
        while self.pids() and time.monotonic() < limit:
            time.sleep(0.01)
        return not self.pids()


def _send(pids: set[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def read_if_there(path: str) -> str:
    """A file of a process that may be gone."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _environment(pid: int) -> dict[str, str]:
    entries = read_if_there(f"/proc/{pid}/environ").split("\0")
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}


def hocket(*args: str | Path) -> Command:
    return Command(*HOCKET, *args)


def train(task: str, text: str, engine: str, out: Path, *more: str) -> Command:
    """Start a run of one of the tasks in saving.py."""
    where = ["--engine", engine, "-n", "2", "--seed", "5", "--out", str(out)]
    return hocket("train", f"{TASKS}:{task}", "-s", text, *where, *more)


def finish(command: Command) -> None:
    status, said = command.end()
    assert status == 0, said


def result(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "result.json").read_text())
    return found


def samples(out: Path) -> int:
    """What the workers have trained on, all together."""
    return sum(worker["samples"] for worker in result(out)["per_worker"])


def model(out: Path) -> dict[str, list[Any]]:
    return {name: tensor.tolist() for name, tensor in load_file(out / "model.safetensors").items()}


def checkpoints(out: Path) -> list[Path]:
    return sorted((out / "checkpoints").glob("step-*.safetensors"))


def points(out: Path) -> int:
    """How many times the run has looked at its model so far."""
    try:
        return (out / "curve.csv").read_text().count("\n") - 1
    except OSError:
        return 0
