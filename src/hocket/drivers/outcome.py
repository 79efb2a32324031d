"""What a user's own loop came to: its learning curve, and the reports of all ranks as one Result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.core.comm import Rank
from hocket.core.message import Message
from hocket.core.serving import Server
from hocket.core.worker import Strategy
from hocket.drivers.judge import distance_from_mean, finite
from hocket.drivers.loader import Loader
from hocket.drivers.prepared import Prepared
from hocket.drivers.report import model_bytes, report, server_report
from hocket.drivers.session import FRAME, Session
from hocket.engines.engine import engine
from hocket.engines.processes import gather_json
from hocket.layouts.mesh import Layout
from hocket.measure.combined import combined
from hocket.measure.result import Result, versions


class Outcome:
    """Of one block, on one rank."""

    def __init__(
        self, rank: Rank, strategy: Strategy, text: str, workers: int, seed: int, layout: Layout | None
    ) -> None:
        self._rank, self._strategy, self._text, self._workers, self._seed = rank, strategy, text, workers, seed
        self._layout = layout
        self._curve: list[dict[str, Any]] = []
        self._metric = "metric"
        self._reports: list[dict[str, Any]] = []
        self._state: dict[str, Tensor] = {}

    def begin(self, first: Prepared) -> None:
        """The clock starts with the first model that is prepared."""
        self._first = first
        self._began_s = self._rank.clock.now()

    def record(self, value: object, now: float, loaders: Sequence[Loader]) -> None:
        """A point of the learning curve, if the value is numbers."""
        found = value if isinstance(value, dict) else {"metric": value}
        numbers = {str(k): float(v) for k, v in found.items() if isinstance(v, (int, float))}
        if not numbers or len(numbers) < len(found) or self._rank.comm.rank:
            return
        self._metric = next(iter(numbers))
        point = {
            "step": self._first.session.worker.step,
            "epoch": _epochs(loaders),
            "samples": self._first.samples * self._workers,
            "seconds": now - self._began_s,
            "train_loss": None,
            "test_loss": None,
            **{f"test_{name}": finite(number) for name, number in numbers.items()},
        }
        self._curve.append(point)
        self._rank.tell("point", point, b"")

    def _tell_events(self, session: Session) -> None:
        if events := session.trace.take():
            self._rank.tell("events", {"events": events}, b"")

    def tell_of_server(self, session: Session, server: Server, began_s: float) -> None:
        """A server's report goes to worker 0."""
        seconds = self._rank.clock.now() - began_s
        session.trace.origin_s = began_s
        self._tell_events(session)
        packed = _json(server_report(session, server, seconds))
        with self._rank.clock.free():
            self._rank.comm.isend(0, Message("report", (), (packed,)), FRAME).wait()

    def end(self, prepared: Sequence[Prepared], before: Sequence[Tensor], loaders: Sequence[Loader]) -> None:
        """After the farewell: all workers' reports, on every worker."""
        rank, first, everyone = self._rank, self._first, self._first.session.everyone
        seconds = rank.clock.now() - self._began_s
        with rank.clock.paused():
            for one in prepared:
                one.session.comm.settle()
                one.session.trace.origin_s = self._began_s
                self._tell_events(one.session)
            mine = report(first.session, seconds) | self._own(prepared, before, loaders, seconds)
            self._reports = gather_json(everyone, mine)
            servers: list[list[dict[str, Any]]] = gather_json(everyone, self._of_servers())
            self._servers = [report for those_of_a_part in servers for report in those_of_a_part]
            if rank.comm.rank == 0:
                self._state = {k: v.detach().clone() for k, v in first.portion.tensors()}
                rank.tell("model", {}, model_bytes(self._state))

    def _own(
        self, prepared: Sequence[Prepared], before: Sequence[Tensor], loaders: Sequence[Loader], seconds: float
    ) -> dict[str, Any]:
        steps = torch.tensor([self._first.session.worker.step])
        self._first.session.group.all_reduce(steps)
        return {
            "verdict": "finished",
            "real_seconds": seconds,
            "steps_done": -(-int(steps) // self._workers),
            "epochs": _epochs(loaders),
            "samples": self._first.samples,
            "bytes_sent": sum(one.session.totals.bytes_sent for one in prepared),
            "messages": sum(one.session.totals.messages for one in prepared),
            "parameters": sum(one.portion.parameters for one in prepared),
            "consensus_distance": self._distance(before[0]),
            "diverged_at_step": None,
        }

    def _distance(self, before: Tensor) -> float | None:
        """None where the model lies in one place: workers have copies of some age, whose distance says nothing."""
        if self._strategy.server_ranks() or "shared-memory" in self._strategy.needs:
            return None
        return distance_from_mean(before, self._first.session.group, self._first.portion)

    def _of_servers(self) -> list[dict[str, Any]]:
        comm = self._rank.comm
        if comm.rank:
            return []
        found = [comm.recv(r, FRAME)[1].tensors[0] for r in range(self._workers, comm.size)]
        return [_from_json(packed) for packed in found]

    def tell(self, task: str) -> None:
        """To who started the ranks."""
        if self._rank.comm.rank == 0:
            self._rank.tell("result", self.result(task).to_json(), b"")

    def result(self, task: str) -> Result:
        last = self._curve[-1] if self._curve else {}
        parts = self._layout.ranks if self._layout else 1
        known: dict[str, Any] = dict(
            task=task,
            strategy=self._text,
            engine=self._rank.engine,
            driver="pytorch",
            workers=self._workers * parts,
            layout=str(self._layout or ""),
            seed=self._seed,
            train_loss=None,
            test_loss=None,
            metric=self._metric,
            test_metric=last.get(f"test_{self._metric}"),
            target=None,
            time_to_target=None,
            curve=self._curve,
            versions=versions(),
        )
        simulated = engine[self._rank.engine].virtual_time
        found = combined(self._reports, self._servers, simulated=simulated, parts=parts)
        return Result(**known | found, state=self._state)


def _epochs(loaders: Sequence[Loader]) -> float:
    """Passes over the data that were trained on."""
    return max((loader.epochs for loader in loaders if loader.trained_on), default=0.0)


def _json(value: dict[str, Any]) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_json(packed: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bytes(packed.cpu().numpy()))
    return found
