"""Starts ranks as processes, and watches them until all are done, one fails, or the user interrupts."""

from __future__ import annotations

import concurrent.futures
import glob
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from hocket.core.brake import Purpose
from hocket.core.environment import CONTROL, PROGRAM
from hocket.core.errors import RankFailed
from hocket.core.status import Status
from hocket.engines.brakes import Brakes
from hocket.engines.engine import STOP_S, TICK_S, Listener, Program, explained, first_failure
from hocket.engines.line import Control, Word

_GRACE_S = 10.0  # for processes to leave after their last word
_START_S = 60.0  # at least, for all ranks to load their libraries and find each other
_LOAD_S = 10.0  # for one core to load the libraries of one rank
_HELLO_S = 0.5  # for one core to start one rank's interpreter
_HEAR_S = 0.3  # after a failure, for the rank that caused it to be heard too

LOOPBACK = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "UCX_NET_DEVICES": "lo",
    "FI_TCP_IFACE": "lo",
    "HYDRA_IFACE": "lo",
    "OMPI_MCA_btl": "^tcp",  # told of an interface, its ranks listen on all of them still
    "OMPI_MCA_oob_tcp_if_include": "lo",
}
"""For ranks on one machine: no library under us shall be reachable from another."""

STARTED = [sys.executable, "-m", "hocket.engines.started"]
"""What a rank's process runs."""


def rank_environment(
    control: Control, main: Program, engine: str, deadline: float, cores: Sequence[int] = ()
) -> dict[str, str]:
    """What a started rank finds in its environment; `cores` are those that the ranks are tied to, if they are."""
    program = {"function": main.function, "argument": main.argument, "engine": engine, "deadline": deadline}
    program |= {"cores": list(cores)}
    return {
        CONTROL: control.address,
        PROGRAM: json.dumps(program),
        "OMP_NUM_THREADS": "1",  # one BLAS thread a worker, or the measured speed-up is fake
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        # Large tensors get fresh memory in every step; in small pages the kernel may take longer for it than the model
        "THP_MEM_ALLOC_ENABLE": os.environ.get("THP_MEM_ALLOC_ENABLE", "1"),
    }


def per_core(size: int) -> float:
    """How many ranks share a core."""
    return size / len(os.sched_getaffinity(0))


def start_limit(size: int, deadline: float) -> float:
    """How many seconds `size` ranks may take to load their libraries and find each other."""
    return max(deadline, _START_S, _LOAD_S * per_core(size))


class Supervisor:
    """One run. Knows the ranks by what they say on the control line, and by what the guard says of their processes."""

    def __init__(self, size: int, control: Control, deadline: float, listener: Listener) -> None:
        self._control, self._deadline, self._listener = control, deadline, listener
        self._statuses = [Status() for _ in range(size)]
        self._results: dict[int, Any] = {}
        self._pids: dict[int, tuple[str, int]] = {}
        self._arrived: set[int] = set()
        self._ready: set[int] = set()
        self._failures: list[RankFailed] = []
        self._output: list[str] = []
        self._lost: set[int] = set()
        self._dead: dict[int, tuple[str, float]] = {}
        self._launcher_status: int | None = None
        self._brakes = Brakes(control, size)
        self._silent_s = [0.0] * size
        self._cpu_ticks = [-1] * size
        self._leave = threading.Event()
        self._relays: list[threading.Thread] = []
        self._ranks_are_ours = False

    def run_ranks(self, env: dict[str, str], each: Sequence[dict[str, str]], pmi: bool = False) -> list[Any]:
        """Start one process a rank, each with its own part of the environment; with `pmi` they find each other."""
        self._ranks_are_ours = True
        commands = [(STARTED, mine) for mine in each]
        return self._run({"launcher": False, "pmi": pmi, "env": env}, commands)

    def run_launcher(self, env: dict[str, str], command: list[str]) -> list[Any]:
        """Let a launcher start the ranks."""
        return self._run({"launcher": True, "pmi": False, "env": env}, [(command, {})])

    def _run(self, plan: dict[str, Any], commands: list[tuple[list[str], dict[str, str]]]) -> list[Any]:
        guard = None
        try:
            guard = self._start(plan, commands)
            self._wait(guard)
        finally:
            self._leave.set()
            self._end(guard)
            self._control.close()
        if self._failures:
            raise explained(first_failure(self._failures), self._statuses)
        return [self._results[r] for r in range(len(self._statuses))]

    def _start(self, plan: dict[str, Any], commands: list[tuple[list[str], dict[str, str]]]) -> subprocess.Popen[bytes]:
        pipes = [os.pipe() for _ in commands]
        guard = subprocess.Popen(
            [sys.executable, "-m", "hocket.engines.guard"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[write for _, write in pipes],
            start_new_session=True,  # Ctrl-C reaches us alone; we end the ranks
        )
        for _, write in pipes:
            os.close(write)
        plan["starter"] = os.getpid()
        plan["commands"] = [
            {"argv": argv, "env": env, "output": write} for (argv, env), (_, write) in zip(commands, pipes, strict=True)
        ]
        assert guard.stdin is not None
        guard.stdin.write(json.dumps(plan).encode() + b"\n")
        guard.stdin.flush()
        self._relays = [threading.Thread(target=self._relay, args=(read,), daemon=True) for read, _ in pipes]
        for relay in self._relays:
            relay.start()
        threading.Thread(target=self._news, args=(guard,), daemon=True).start()
        return guard

    def _relay(self, read: int) -> None:
        with open(read, errors="replace") as lines:
            for line in lines:
                self._output.append(line)
                del self._output[:-40]
                self._control.words.put(Word(-1, "output", {"line": line.rstrip("\n")}))

    def _news(self, guard: subprocess.Popen[bytes]) -> None:
        """Pass on what the guard tells of the processes."""
        assert guard.stdout is not None
        for line in guard.stdout:
            data = json.loads(line)
            self._control.words.put(Word(data.pop("number"), "ended", data))

    def _wait(self, guard: subprocess.Popen[bytes]) -> None:
        """Watch on another thread: an interrupt, which reaches this one, must not tear a word that is being heard."""
        with concurrent.futures.ThreadPoolExecutor(1, "supervisor") as pool:
            watch = pool.submit(self._watch, guard)
            try:
                watch.result()
            except KeyboardInterrupt:
                if not self._brake("stop"):
                    raise
                try:
                    watch.result(STOP_S)
                except concurrent.futures.TimeoutError:
                    raise KeyboardInterrupt from None
                if not self._failures and len(self._results) < len(self._statuses):
                    raise
            finally:
                self._leave.set()

    def _brake(self, purpose: Purpose) -> bool:
        """Ask all ranks to pause after a step that all can reach. False if they have not even begun."""
        if len(self._ready) < len(self._statuses):
            return False
        self._brakes.pull(purpose)
        return True

    def _watch(self, guard: subprocess.Popen[bytes]) -> None:
        size = len(self._statuses)
        began = last = time.monotonic()
        failed_at = None
        while len(self._results) < size and not self._leave.is_set():
            self._drain()
            self._listener.tick(self._statuses)
            now = time.monotonic()
            self._check_deaths(now)
            if failed_at is None and self._failures:
                failed_at = now
            if failed_at is not None:
                if now > failed_at + _HEAR_S:
                    return
                continue
            if len(self._results) < size and guard.poll() is not None:
                self._drain()
                self._ended_early()
            self._check_arrival(now - began)
            self._check_silence(min(now - last, 5 * TICK_S))  # we ourselves may have been stopped
            last = now
        self._listener.tick(self._statuses)
        limit = time.monotonic() + _GRACE_S
        while time.monotonic() < limit and guard.poll() is None and not self._leave.is_set():
            self._drain()
        for relay in self._relays:  # the last lines may still be in the pipes
            relay.join(_HEAR_S)
        self._drain()

    def _check_arrival(self, waited_s: float) -> None:
        size = len(self._statuses)
        limits = (
            (self._arrived, max(self._deadline, _HELLO_S * per_core(size))),
            (self._ready, start_limit(size, self._deadline)),
        )
        for here, limit_s in limits:
            if waited_s > limit_s and (missing := set(range(len(self._statuses))) - here):
                reason = f"it never arrived within {limit_s:g} s of the start; give it more with --deadline SECONDS"
                self._fail(min(missing), self._statuses[min(missing)].operation, reason)
                return

    def _check_silence(self, passed_s: float) -> None:
        """A rank reports several times a second. One that neither does so nor uses or wants a processor has stopped.

        (Code that holds the interpreter's lock for long keeps a rank from reporting, but uses a processor; and a
        machine that is too busy keeps it from both, but it wants one.) Until it is ready, other limits hold.
        """
        for rank in self._ready & self._pids.keys() - self._results.keys():
            self._silent_s[rank] += passed_s
            if self._silent_s[rank] < self._deadline / 2:
                self._cpu_ticks[rank] = -1
                continue
            ticks, wants = self._work_of(rank)
            if wants or ticks > self._cpu_ticks[rank] >= 0:
                self._silent_s[rank] = 0.0
            elif self._silent_s[rank] > self._deadline:
                status = self._statuses[rank]
                self._fail(
                    rank,
                    f"{status.operation} (step {status.step})",
                    f"no sign of life for {self._silent_s[rank]:.0f} s, the deadline; is its process stopped? "
                    f"Give it more with --deadline SECONDS",
                )
            self._cpu_ticks[rank] = ticks

    def _work_of(self, rank: int) -> tuple[int, bool]:
        """How much processor time a rank's process has used, and whether it wants more; known only on this machine."""
        host, pid = self._pids[rank]
        ticks, wants = 0, False
        if host == socket.gethostname():
            for path in glob.glob(f"/proc/{pid}/task/*/stat"):
                try:
                    with open(path) as file:
                        fields = file.read().rpartition(")")[2].split()
                except OSError:
                    continue  # the thread has ended
                ticks += int(fields[11]) + int(fields[12])
                wants |= fields[0] == "R"
        return ticks, wants

    def _drain(self) -> None:
        """Hear everything that was said, waiting a tick for the first word."""
        try:
            self._hear(self._control.words.get(timeout=TICK_S))
            while True:
                self._hear(self._control.words.get_nowait())
        except queue.Empty:
            pass

    def _hear(self, word: Word) -> None:
        rank, data = word.rank, word.data
        if 0 <= rank < len(self._statuses):
            self._silent_s[rank] = 0.0
        match word.kind:
            case "output":
                self._listener.output(data["line"])
            case "hello":
                self._pids[rank] = (data["host"], data["pid"])
                self._arrived.add(rank)
            case "ready":
                self._ready.add(rank)
            case "status":
                for key, value in data.items():
                    setattr(self._statuses[rank], key, value)
            case "brake":
                self._brake(data["purpose"])
            case "promise":
                self._brakes.promised(rank, data["step"])
                self._release()
            case "done":
                self._results[rank] = data["result"]
                self._release()
            case "error":
                self._fail(rank, data["operation"], data["reason"], data["traceback"])
            case "ended":
                self._process_ended(rank, data)
            case "lost":
                self._lost.add(rank)
                if not self._ranks_are_ours:
                    self._gone(rank, "killed, or out of memory")
            case _:
                self._listener.hear(rank, word.kind, data, word.blob)

    def _release(self) -> None:
        if self._brakes.release(self._results.keys()) == 1:
            self._leave.set()  # nobody has taken a step, or this program never asks whether to pause

    def _process_ended(self, number: int, data: dict[str, Any]) -> None:
        status = data.get("status", 0)
        if "error" in data:
            self._fail(number, "start", data["error"])
        elif not self._ranks_are_ours:
            self._launcher_status = status
        else:
            how = f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"
            how += ", perhaps for want of memory" if status == -signal.SIGKILL else ""
            self._dead[number] = (how, time.monotonic())

    def _check_deaths(self, now: float) -> None:
        """Judge a rank whose process has ended once all that it had said is heard."""
        for rank, (how, at) in list(self._dead.items()):
            if rank in self._lost or rank not in self._arrived or now > at + _HEAR_S:
                del self._dead[rank]
                self._gone(rank, how)

    def _gone(self, rank: int, how: str) -> None:
        """A rank's process is no more. Unless it had said its last word, it has failed."""
        host, pid = self._pids.pop(rank, (socket.gethostname(), 0))
        if rank in self._results or any(f.rank == rank for f in self._failures):
            return
        status = self._statuses[rank]
        which = f"pid {pid} on {host}" if pid else f"on {host}"
        self._fail(rank, f"{status.operation} (step {status.step})", f"its process ({which}) died: {how}", self._tail())

    def _tail(self) -> str:
        return "".join(self._output)

    def _fail(self, rank: int, operation: str, reason: str, trace: str = "") -> None:
        self._failures.append(RankFailed(rank, operation, reason, trace))

    def _ended_early(self) -> None:
        if self._failures or len(self._results) == len(self._statuses):
            return
        missing = min(set(range(len(self._statuses))) - set(self._results))
        status = "" if self._launcher_status is None else f" with exit status {self._launcher_status}"
        self._fail(missing, "start", f"its launcher ended{status} before it was done", self._tail())

    def _end(self, guard: subprocess.Popen[bytes] | None) -> None:
        """The guard ends what still lives as soon as we hang up."""
        if guard is None:
            return
        assert guard.stdin is not None
        try:
            guard.stdin.close()
        except BrokenPipeError:
            pass
        try:
            guard.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            guard.kill()
            guard.wait()
