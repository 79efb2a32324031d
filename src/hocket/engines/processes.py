"""The life of a rank that is a process: started by Hocket, or found where a launcher has started it already."""

from __future__ import annotations

import importlib
import json
import queue
import socket
import sys
import threading
import time
import traceback
from typing import Any

import numpy as np
import torch

from hocket.core.brake import Brake
from hocket.core.clock import RealClock
from hocket.core.comm import Comm, Rank
from hocket.core.errors import RankFailed, named, said
from hocket.core.frames import why
from hocket.core.speaking import Abort, await_turn, exit_status
from hocket.core.status import Status
from hocket.engines import local
from hocket.engines.brakes import Brakes, hearing
from hocket.engines.engine import TICK_S, Listener, Main, Program, operation_of
from hocket.engines.engine import engine as engines
from hocket.engines.line import Control, Link


def run_started(link: Link, start: dict[str, Any], brake: Brake) -> int:
    """The life of a rank that Hocket started. Returns the exit status."""
    status = link.status
    try:
        torch.set_num_threads(1)
        engine = importlib.import_module(f"hocket.engines.{start['engine']}")  # which registers it
        status.operation = "join"
        comm = engine.connect(start["deadline"])
        link.tell("ready", {})
        status.operation = "start"
        rank = Rank(comm, RealClock(), link.tell, status, engines[start["engine"]].offers, brake, start["engine"])
        local.current.set(rank)
        result = Program(start["function"], start["argument"])(rank)
        status.operation = "end"
        link.tell("done", {"result": result})
        return 0
    except BaseException as error:
        operation = operation_of(error, status)
        word = {"operation": operation, "reason": named(error), "traceback": traceback.format_exc()}
        link.tell_status()  # whether anything was trained decides what the command says
        link.tell("error", word)
        return 1


def run_joined(comm: Comm, main: Main, listener: Listener, offers: frozenset[str], abort: Abort) -> list[Any]:
    """The life of a rank that another launcher (mpiexec, srun, torchrun) started: rank 0 hosts the listener."""
    torch.set_num_threads(1)
    status = Status()
    with joined_control(comm, listener) as address:
        host, _, address = address.partition("/")
        link = Link(address, comm.rank, status) if host == socket.gethostname() else None
        tell = link.tell if link else lambda kind, data, blob=b"": None
        brake = Brake()
        if link:
            link.start(on_lost=lambda: None, hear=hearing(link, brake))
        rank = Rank(comm, RealClock(), tell, status, offers, brake)
        local.current.set(rank)
        try:
            results = gather_json(comm, main(rank))
        except BaseException as error:
            await_turn(comm.rank, error)
            print(f"hocket: {why(error, comm.rank, status.operation)}", file=sys.stderr, flush=True)
            if link:
                word = {"operation": status.operation, "reason": said(error), "traceback": ""}
                link.tell("error", word)
            time.sleep(0.5)  # for rank 0 to record what happened before everything ends
            abort(exit_status(error))
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
        brakes, here = Brakes(self._control, self._comm.size), set()
        while True:
            try:
                word = self._control.words.get(timeout=TICK_S)
            except queue.Empty:
                self._listener.tick(statuses)
                if self._stop.is_set():
                    return
                continue
            match word.kind:
                case "hello":
                    here.add(word.rank)
                case "lost":
                    here.discard(word.rank)
                case "brake" if len(here) == self._comm.size:  # ranks on other machines have no line to us
                    brakes.pull(word.data["purpose"])
                case "brake":
                    pass
                case "promise":
                    brakes.promised(word.rank, word.data["step"])
                    brakes.release(())
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
