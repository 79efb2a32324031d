"""What stands between a run and its processes: `python -m hocket.engines.guard`, one for each run.

It starts the ranks, or their launcher, and tells how each of them ended. When the starter hangs up or dies, even by
SIGKILL, it ends every process below itself and removes what they left in shared memory. The ranks cannot do this:
inside MPI_Init a process hears nothing, and a killed one cleans up nothing.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import re
import selectors
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hocket.engines.pmi import Wireup

_TICK_S = 0.1  # how often it looks whether the starter lives, should a fork of it hold the line open
_TERM_S = 0.5  # for a launcher to end ranks on other machines
_KILL_S = 5.0  # for killed processes to go
_PR_SET_PDEATHSIG, _PR_SET_TIMERSLACK, _PR_SET_CHILD_SUBREAPER = 1, 29, 36
_SLACK_NS = 1000
_SHM = Path("/dev/shm")
_PREFIXES = ("mpich_sh", "hocket-")
_SEGMENT = re.compile(rb"/dev/shm/((?:mpich_sh|hocket-)[^ /\n]*)\n")
_FOLDER, _NAMES = "hocket-run-", "names"


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def die_with_parent() -> None:
    """Let this process be killed when the one that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def wake_in_time() -> None:
    """Let this thread's sleeps end when they should: the kernel takes 50 us more, which is as long as some of ours."""
    _prctl(_PR_SET_TIMERSLACK, _SLACK_NS)


def descendants(leaves: bool = False) -> set[int]:
    """Every process below this one, or only those that have none below themselves."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text(errors="replace")
            except OSError:
                continue
            state, parent = stat.rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(entry)] = int(parent)
    found: set[int] = set()
    todo = {os.getpid()}
    while todo:
        todo = {pid for pid, parent in parents.items() if parent in todo} - found
        found |= todo
    return found - set(parents.values()) if leaves else found


def segments_of(pid: int) -> set[str]:
    """The names of the files in /dev/shm that a process has mapped, or has made and not mapped yet."""
    held = b""
    with suppress(OSError):  # it has ended
        held = Path(f"/proc/{pid}/maps").read_bytes()
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):  # closed meanwhile
                held += b"\n" + os.readlink(f"/proc/{pid}/fd/{fd}").encode()
    return {name.decode() for name in _SEGMENT.findall(held + b"\n")}


def remove_own_segments() -> None:
    """For a process that ends at once, and all others of its run with it."""
    for name in segments_of(os.getpid()):
        (_SHM / name).unlink(missing_ok=True)


class Segments:
    """The files in /dev/shm that a run's processes made.

    Their names do not tell whose they are. So whenever one appears, it is looked up in the memory maps of our own
    processes, while they live: afterwards nobody could tell. A folder holds files whose place can be chosen, and the
    others' names: should this process be killed as well, the next guard finds it, and that nobody holds its lock.
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._found: set[str] = set()
        self.folder: Path | None = None
        if os.access(_SHM, os.W_OK):
            for folder in _SHM.glob(f"{_FOLDER}*"):
                _sweep(folder)
            self.folder = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=_SHM))
            self._names = (self.folder / "new").open("w")
            fcntl.flock(self._names, fcntl.LOCK_EX)
            (self.folder / "new").rename(self.folder / _NAMES)  # from now on others may look

    def look(self) -> None:
        """Note new files."""
        names = {name for name in os.listdir(_SHM) if name.startswith(_PREFIXES)} if self.folder else set()
        if names - self._seen:
            self._seen = names
            self.search(descendants())

    def search(self, pids: set[int]) -> None:
        """Note the files of processes."""
        if not self.folder:
            return
        for pid in pids:
            held = segments_of(pid)
            self._names.writelines(f"{name}\n" for name in held - self._found)
            self._names.flush()
            self._found |= held

    def remove(self) -> None:
        if self.folder:
            self._names.close()
            _sweep(self.folder)


def _sweep(folder: Path) -> None:
    """Remove what a run has left, unless its guard lives."""
    try:
        with (folder / _NAMES).open() as names:
            fcntl.flock(names, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in names.read().split():
                (_SHM / name).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass  # in use, another user's, or just gone


class Guard:
    """Holds the processes of one run."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._starter: int = plan["starter"]
        self._launcher: bool = plan["launcher"]
        self._segments = Segments()
        self._wireup = Wireup(len(plan["commands"])) if plan["pmi"] else None
        self._running: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        for command in plan["commands"]:
            os.set_inheritable(command["output"], False)  # each process gets its own alone
        for number, command in enumerate(plan["commands"]):
            self._start(number, command["argv"], plan["env"] | command["env"], command["output"])
        if self._wireup:
            self._wireup.started()
            for rank, connection in enumerate(self._wireup.sockets):
                self._selector.register(connection, selectors.EVENT_READ, rank)

    def _start(self, number: int, argv: list[str], env: dict[str, str], output: int) -> None:
        env = os.environ | env
        if self._segments.folder:
            env["UCX_POSIX_DIR"] = str(self._segments.folder)
        fd = -1
        if self._wireup:
            wiring, fd = self._wireup.environment(number)
            env |= wiring
            os.set_inheritable(fd, True)
        files = [
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, output, 1),
            (os.POSIX_SPAWN_DUP2, output, 2),
        ]
        try:
            ignored_by_python = [signal.SIGPIPE, signal.SIGXFSZ]
            pid = os.posix_spawn(argv[0], argv, env, file_actions=files, setsigdef=ignored_by_python)
            self._running[pid] = number
        except OSError as error:
            _tell(number=number, error=f"cannot start {argv[0]}: {error.strerror}")
        os.close(output)
        if fd >= 0:
            os.set_inheritable(fd, False)

    def watch(self) -> None:
        """Until all processes have ended, or the starter has hung up or died."""
        wake, child_ended = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(child_ended, warn_on_full_buffer=False)
        self._selector.register(0, selectors.EVENT_READ, "starter")
        self._selector.register(wake, selectors.EVENT_READ, "child")
        self._reap()
        while self._running and os.getppid() == self._starter:
            for key, _ in self._selector.select(_TICK_S):
                if key.data == "starter":
                    return  # it says nothing more: the line can only have closed
                if key.data == "child":
                    os.read(wake, 4096)
                elif self._wireup and not self._wireup.serve(key.data):
                    self._selector.unregister(key.fileobj)
            self._segments.look()
            self._reap()

    def _reap(self) -> None:
        """Note which processes have ended. Orphans of theirs are ours too."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                number = self._running.pop(ended[0], None)
                if number is not None:
                    _tell(number=number, status=os.waitstatus_to_exitcode(ended[1]))
        except ChildProcessError:
            pass

    def end(self) -> None:
        """Leave nothing behind."""
        if self._launcher and self._running:
            # It cleans up here and on other machines, once it sees that its ranks have ended.
            _signal(set(self._running), signal.SIGTERM)
            self._kill(descendants(leaves=True))
            self._wait(_TERM_S)
        until = time.monotonic() + _KILL_S
        while (left := descendants()) and time.monotonic() < until:
            self._kill(left)
            self._wait(_TICK_S)
        self._reap()
        self._segments.remove()

    def _kill(self, pids: set[int]) -> None:
        _signal(pids, signal.SIGSTOP)  # what stands still makes no more files or processes
        self._segments.search(pids)
        _signal(pids, signal.SIGKILL)

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while descendants() and time.monotonic() < until:
            time.sleep(0.005)
            self._reap()


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def _tell(**news: Any) -> None:
    try:
        os.write(1, json.dumps(news).encode() + b"\n")
    except OSError:
        pass  # the starter has died


def main() -> None:
    if not (line := sys.stdin.buffer.readline()):
        return  # the starter died first
    plan = json.loads(line)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # A batch system signals every process of a job; what is to happen then is the starter's decision.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    guard = Guard(plan)
    try:
        guard.watch()
    finally:
        guard.end()


if __name__ == "__main__":
    main()
