"""Measure the collectives: steps, bytes and time of each way to form a sum, against ranks and size."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hocket.core.collectives import ALGORITHMS
from hocket.core.comm import Comm, Rank
from hocket.core.errors import RankFailed, UserError
from hocket.core.message import Message
from hocket.engines.binding import allowed_cores
from hocket.engines.catalogue import Listener, Program, engine
from hocket.measure import disk
from hocket.measure.meter import Metered
from hocket.measure.trace import Trace
from hocket.run.progress import Display

FOLDER = "measured"
_TAG = 7002


def server(comm: Comm, x: Tensor) -> None:
    """Sum in place, on rank 0, who sends the result to each: 2 (p - 1) (alpha + n beta), all at one network card."""
    if comm.rank:
        comm.send(0, Message("gather", (), (x,)), _TAG)
        x.copy_(comm.recv(0, _TAG)[1].tensors[0])
        return
    for source in range(1, comm.size):  # in rank order, so that every run gives the same bits
        x.add_(comm.recv(source, _TAG)[1].tensors[0])
    for to in range(1, comm.size):
        comm.send(to, Message("spread", (), (x,)), _TAG)


WAYS: dict[str, Callable[[Comm, Tensor], None]] = {str(name): way for name, way in ALGORITHMS.items()} | {
    "server": server
}


def measure(rank: Rank, argument: dict[str, Any]) -> list[dict[str, Any]]:
    """Every way with every size, taking turns; all ranks run it."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for _ in range(argument["repeats"]):
        for floats in argument["sizes"]:
            for name, reduce in WAYS.items():
                x = torch.ones(floats)
                metered = Metered(rank.comm, rank.clock, rank.status, Trace(0))
                rank.comm.barrier()
                began = rank.clock.now()
                reduce(metered, x)
                seconds = rank.clock.now() - began
                if x[0] != rank.comm.size:
                    raise AssertionError(f"{name} gave {x[0]} for a sum over {rank.comm.size} ranks")
                entry = found.setdefault((name, floats), {"seconds": []})
                entry |= {"messages": metered.totals.messages, "bytes": metered.totals.bytes_sent}
                entry["seconds"].append(seconds)
    return [{"way": name, "floats": floats, **entry} for (name, floats), entry in found.items()]


def run(asked: Mapping[str, Any], out: Path, display: Display) -> tuple[list[dict[str, Any]], list[str]]:
    """One file an engine and number of ranks; those that are there are not measured again. Returns rows and notes."""
    unknown = set(asked) - {"engines", "ranks", "sizes", "repeats"}
    if unknown:
        raise UserError(f"collectives: no setting is called {sorted(unknown)[0]!r}: engines, ranks, sizes, repeats are")
    rows, notes, cores = [], [], len(allowed_cores())
    for name in asked["engines"]:
        real = not engine[name].virtual_time
        if real and (beyond := [ranks for ranks in asked["ranks"] if ranks > cores]):
            notes.append(f"{', '.join(map(str, beyond))} ranks on {name}: this machine has {cores} cores")
        for ranks in asked["ranks"]:
            if real and ranks > cores:
                continue
            path = out / FOLDER / f"{name}-{ranks}.json"
            argument = {"sizes": list(asked["sizes"]), "repeats": asked["repeats"] if real else 1}
            try:
                rows += _read(path, argument) or _measured(path, name, ranks, argument, display)
            except (UserError, RankFailed) as error:
                notes.append(f"{ranks} ranks on {name}: {' '.join(str(error).split())}")
    return rows, notes


def _read(path: Path, argument: dict[str, Any]) -> list[dict[str, Any]]:
    try:
        found = json.loads(path.read_text())
        rows: list[dict[str, Any]] = found["rows"] if found["asked"] == argument else []
        return rows
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _measured(path: Path, name: str, ranks: int, argument: dict[str, Any], display: Display) -> list[dict[str, Any]]:
    display.note(f"collectives of {ranks} ranks on {name}")
    everyone = engine.make(name).run(Program(f"{__name__}:measure", argument), ranks, Listener())
    rows = []
    for entries in zip(*everyone, strict=True):
        times = [max(of_ranks) for of_ranks in zip(*(entry["seconds"] for entry in entries), strict=True)]
        rows.append(
            {
                "way": entries[0]["way"],
                "ranks": ranks,
                "engine": name,
                "simulated": engine[name].virtual_time,
                "bytes": 4 * entries[0]["floats"],
                "seconds": statistics.median(times),
                "least_s": min(times),
                "most_s": max(times),
                "messages_of_busiest_rank": max(entry["messages"] for entry in entries),
                "bytes_of_busiest_rank": max(entry["bytes"] for entry in entries),
                "bytes_sent": sum(entry["bytes"] for entry in entries),
            }
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.write(path, (json.dumps({"asked": argument, "rows": rows}, indent=1) + "\n").encode())
    return rows
