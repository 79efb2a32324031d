"""Ranks as processes: started and supervised here, or found where a launcher has started them already."""

from __future__ import annotations

import importlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hocket.core.clock import RealClock
from hocket.core.comm import Comm, Rank
from hocket.core.environment import CONTROL, PROGRAM
from hocket.core.errors import RankFailed
from hocket.core.status import Status
from hocket.engines import local
from hocket.engines.base import TICK_S, Listener, Main, Program, first_failure, operation_of
from hocket.engines.line import Control, Link, Word

_GRACE_S = 10.0  # for processes to leave after their last word
_START_S = 60.0  # at least, for all ranks to load their libraries and find each other


def rank_environment(control: Control, main: Program, engine: str, deadline: float) -> dict[str, str]:
    """What a started rank finds in its environment."""
    program = {"function": main.function, "argument": main.argument, "engine": engine, "deadline": deadline}
    return {
        CONTROL: control.address,
        PROGRAM: json.dumps(program),
        "OMP_NUM_THREADS": "1",  # one BLAS thread a worker, or the measured speed-up is fake
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


class Supervisor:
    """Watches started ranks until all are done, one fails, or the user interrupts. Leaves no process behind."""

    def __init__(self, size: int, control: Control, deadline: float, listener: Listener) -> None:
        self._control, self._deadline, self._listener = control, deadline, listener
        self._statuses = [Status() for _ in range(size)]
        self._results: dict[int, Any] = {}
        self._pids: dict[int, tuple[str, int]] = {}
        self._arrived: set[int] = set()
        self._ready: set[int] = set()
        self._failures: list[RankFailed] = []
        self._output: list[str] = []
        self._processes: list[subprocess.Popen[str]] = []

    def run(self, commands: Sequence[tuple[list[str], dict[str, str]]]) -> list[Any]:
        try:
            for command, env in commands:
                self._processes.append(self._start(command, env))
            self._watch()
        finally:
            self._end()
            self._control.close()
        if self._failures:
            raise self._explained(first_failure(self._failures))
        return [self._results[r] for r in range(len(self._statuses))]

    def _explained(self, failure: RankFailed) -> RankFailed:
        """A rank that waited in vain cannot know what the others did meanwhile; here it is known."""
        if not failure.reason.startswith("DeadlineExceeded:"):
            return failure
        others = [
            f"rank {r} was in {s.operation} at step {s.step}" for r, s in enumerate(self._statuses) if r != failure.rank
        ]
        reason = f"{failure.reason}; {', '.join(others[:8])}"
        return RankFailed(failure.rank, failure.operation, reason, failure.traceback)

    def _start(self, command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            env=os.environ | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches us alone; we end the ranks
        )
        threading.Thread(target=self._relay, args=(process,), daemon=True).start()
        return process

    def _relay(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._output.append(line)
            del self._output[:-40]
            self._control.words.put(Word(-1, "output", {"line": line.rstrip("\n")}))

    def _watch(self) -> None:
        size = len(self._statuses)
        began = time.monotonic()
        failed_at = None
        while len(self._results) < size:
            self._drain()
            self._listener.tick(self._statuses)
            if failed_at is None and self._failures:
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() > failed_at + 0.3:
                return  # the grace lets the rank that caused the failure speak too
            if len(self._results) == size or failed_at is not None:
                continue
            if all(p.poll() is not None for p in self._processes):
                self._drain()
                self._ended_early()
            else:
                waited = time.monotonic() - began
                self._check_arrival(self._arrived, waited, self._deadline)
                self._check_arrival(self._ready, waited, max(self._deadline, _START_S))
        self._listener.tick(self._statuses)
        limit = time.monotonic() + _GRACE_S
        while time.monotonic() < limit and any(p.poll() is None for p in self._processes):
            self._drain()
        self._drain()

    def _check_arrival(self, arrived: set[int], waited_s: float, limit_s: float) -> None:
        if waited_s > limit_s and (missing := set(range(len(self._statuses))) - arrived):
            rank = min(missing)
            reason = f"it never arrived within {limit_s:g} s of the start"
            self._fail(rank, self._statuses[rank].operation, reason)

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
            case "done":
                self._results[rank] = data["result"]
            case "error":
                self._fail(rank, data["operation"], data["reason"], data["traceback"])
            case "lost":
                host, pid = self._pids.pop(rank, ("", 0))
                if rank not in self._results and not any(f.rank == rank for f in self._failures):
                    status = self._statuses[rank]
                    self._fail(
                        rank,
                        f"{status.operation} (step {status.step})",
                        f"its process (pid {pid} on {host}) died: killed, or out of memory",
                    )
            case _:
                self._listener.hear(rank, word.kind, data, word.blob)

    def _fail(self, rank: int, operation: str, reason: str, trace: str = "") -> None:
        self._failures.append(RankFailed(rank, operation, reason, trace))

    def _ended_early(self) -> None:
        if self._failures or len(self._results) == len(self._statuses):
            return
        codes = [p.returncode for p in self._processes]
        missing = min(set(range(len(self._statuses))) - set(self._results))
        reason = f"its launcher ended with exit status {max(codes, key=abs)} before it was done"
        self._fail(missing, "start", reason, "".join(self._output))

    def _end(self) -> None:
        """End every process of the run that still lives."""
        here = socket.gethostname()
        for process in self._processes:
            if process.poll() is None:
                _signal_group(process.pid, signal.SIGTERM)
        for host, pid in list(self._pids.values()):
            if host == here and any(p.poll() is None for p in self._processes):
                _signal(pid, signal.SIGKILL)
        for process in self._processes:
            try:
                process.wait(0.5)
            except subprocess.TimeoutExpired:
                _signal_group(process.pid, signal.SIGKILL)
                process.wait()


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        pass


def run_started(link: Link, start: dict[str, Any]) -> int:
    """The life of a rank that Hocket started. Returns the exit status."""
    status = link.status
    try:
        torch.set_num_threads(1)
        engine = importlib.import_module(f"hocket.engines.{start['engine']}")
        status.operation = "join"
        comm = engine.connect(start["deadline"])
        link.tell("ready", {})
        status.operation = "start"
        rank = Rank(comm, RealClock(), link.tell, status)
        local.current.rank = rank
        result = Program(start["function"], start["argument"])(rank)
        status.operation = "end"
        link.tell("done", {"result": result})
        return 0
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        operation = operation_of(error, status)
        word = {"operation": operation, "reason": reason, "traceback": traceback.format_exc()}
        link.tell("error", word)
        return 1


def run_joined(comm: Comm, main: Main, listener: Listener, abort: Callable[[], None]) -> list[Any]:
    """The life of a rank that another launcher (mpiexec, srun, torchrun) started: rank 0 hosts the listener."""
    torch.set_num_threads(1)
    status = Status()
    with joined_control(comm, listener) as address:
        host, _, address = address.partition("/")
        link = Link(address, comm.rank, status) if host == socket.gethostname() else None
        tell = link.tell if link else lambda kind, data, blob=b"": None
        if link:
            link.start(on_lost=lambda: None)
        rank = Rank(comm, RealClock(), tell, status)
        local.current.rank = rank
        try:
            results = gather_json(comm, main(rank))
        except BaseException as error:
            where = f"rank {comm.rank} failed in {status.operation}: {type(error).__name__}: {error}"
            print(f"hocket: {where}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            if link:
                word = {"operation": status.operation, "reason": str(error), "traceback": ""}
                link.tell("error", word)
            time.sleep(0.5)  # for rank 0 to record what happened before everything ends
            abort()
            raise
        if link:
            link.close()
        return results


class joined_control:
    """Rank 0's control for ranks that it did not start; gives every rank `host/address`."""

    def __init__(self, comm: Comm, listener: Listener) -> None:
        self._comm, self._listener = comm, listener
        self._control = Control() if comm.rank == 0 else None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="listener", daemon=True)

    def __enter__(self) -> str:
        address = ""
        if self._control is not None:
            address = f"{socket.gethostname()}/{self._control.address}"
            self._thread.start()
        return str(gather_json(self._comm, address)[0])

    def __exit__(self, *_: object) -> None:
        if self._control is not None:
            self._stop.set()
            self._thread.join(2.0)
            self._control.close()

    def _serve(self) -> None:
        assert self._control is not None
        statuses = [Status() for _ in range(self._comm.size)]
        while True:
            try:
                word = self._control.words.get(timeout=TICK_S)
            except queue.Empty:
                self._listener.tick(statuses)
                if self._stop.is_set():
                    return
                continue
            match word.kind:
                case "hello" | "lost":
                    pass
                case "status":
                    for key, value in word.data.items():
                        setattr(statuses[word.rank], key, value)
                case "error":
                    data = word.data
                    self._listener.failed(RankFailed(word.rank, data["operation"], data["reason"]))
                case _:
                    self._listener.hear(word.rank, word.kind, word.data, word.blob)


def gather_json(comm: Comm, value: Any) -> list[Any]:
    """Every rank's JSON value, on every rank."""
    mine = torch.from_numpy(np.frombuffer(json.dumps(value).encode(), np.uint8).copy())
    length = torch.tensor([mine.numel()], dtype=torch.int64)
    lengths = torch.zeros(comm.size, dtype=torch.int64)
    comm.all_gather(lengths, length)
    longest = int(lengths.max())
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: mine.numel()] = mine
    everyone = torch.zeros(comm.size * longest, dtype=torch.uint8)
    comm.all_gather(everyone, padded)
    rows = everyone.view(comm.size, longest)
    return [json.loads(bytes(rows[r, : int(lengths[r])].numpy())) for r in range(comm.size)]
