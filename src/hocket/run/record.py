"""What the ranks tell, kept: the run's folder, the display and the Result."""

from __future__ import annotations

import dataclasses
import math
import traceback as tb
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.core.errors import RankFailed
from hocket.core.status import Status
from hocket.drivers.plan import Plan
from hocket.engines.catalogue import Listener
from hocket.measure.folder import RunFolder
from hocket.measure.losses import PARTS, time_to_loss
from hocket.measure.result import TIMES, Result, Verdict, staleness_summary, versions
from hocket.run.blame import NothingTrained
from hocket.run.past import checkpoint_name
from hocket.run.progress import Display
from hocket.tasks import Task

WORKER_KEYS = (
    "seconds", *TIMES, "bytes_sent", "messages", "steps", "samples", "own_metric",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class About:
    """What is recorded of a run and known before it begins."""

    plan: Plan
    task: Task
    engine: str
    """As the spec names it."""
    virtual_time: bool
    target: float | None
    """The metric whose time is taken: the run's goal, or the task's own."""
    curve: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Of a run that goes on, the points before."""


class Recorder(Listener):
    """Hears the ranks, keeps the folder and the display up to date, and makes the Result."""

    def __init__(self, about: About, folder: RunFolder | None, display: Display) -> None:
        self._about, self._folder, self._display = about, folder, display
        self._curve = list(about.curve)
        self._statuses: Sequence[Status] = []
        self._model = b""
        self._closed = False

    def record(self, title: str, run: Callable[[], list[dict[str, Any]]]) -> Result:
        """Run, and write down what came of it, however it ends."""
        try:
            self._display.begin(title, self._about.plan.steps, self._about.task.words_a_sample())
            result = self._finished(run())
        except KeyboardInterrupt:
            self._close(self._cut_off("interrupted", "interrupted by the user"))
            raise
        except RankFailed as failure:
            self.failed(failure)
            if any(status.step for status in self._statuses):
                raise
            raise NothingTrained.of(failure) from failure
        except BaseException:
            self._close(self._cut_off("crashed", tb.format_exc()))
            raise
        missing = self._close(result.to_json())
        return dataclasses.replace(result, error=missing) if missing else result

    def hear(self, rank: int, kind: str, data: dict[str, Any], blob: bytes) -> None:
        folder = self._folder
        match kind:
            case "events" if folder:
                for event in data["events"]:
                    folder.event(rank, event)
            case "point":
                again = any(point["epoch"] == data["epoch"] for point in self._curve)  # in a run made longer
                self._curve.append(data)
                self._display.metric(self._about.task.metric_name, data[self._metric_key()], data["train_loss"])
                if folder and not again:
                    folder.point(data)
            case "note":
                self._display.note(data["line"])
            case "model":
                self._model = blob
                if folder:
                    folder.model(blob)
                    folder.vectors(lambda path: self._about.task.write(path, self._state()))
            case "checkpoint" if folder:
                folder.checkpoint(checkpoint_name(data["step"]), blob)

    def output(self, line: str) -> None:
        self._display.note(line)

    def tick(self, statuses: Sequence[Status]) -> None:
        self._statuses = statuses[: self._about.plan.workers]  # servers have no progress of their own
        if self._folder and any(status.step for status in self._statuses):
            self._folder.start()  # now the record may take the place of another
        self._display.update(self._statuses)

    def failed(self, failure: RankFailed) -> None:
        self._close(self._cut_off("crashed", f"{failure}\n{failure.traceback}".rstrip()))

    def _metric_key(self) -> str:
        return f"test_{self._about.task.metric_name}"

    def _close(self, record: dict[str, Any]) -> str | None:
        """Write the record; returns one line on what could not be written, if anything."""
        if self._closed:
            return None
        self._closed = True
        missing = self._folder.finish(record) if self._folder else None
        self._display.end(record)  # last, as whoever reads it may have gone
        return missing

    def _finished(self, everyone: list[dict[str, Any]]) -> Result:
        workers = self._about.plan.workers
        reports, servers = everyone[:workers], everyone[workers:]
        first = reports[0]
        histogram: Counter[int] = Counter()
        for report in servers or reports:  # where there are servers, updates happen there
            histogram.update({int(k): v for k, v in report["staleness"].items()})
        if self._folder and (dropped := sum(r["dropped_events"] for r in everyone)):
            why = f"trace={self._about.plan.trace}"
            self._folder.event(-1, {"event": "not-logged", "count": dropped, "why": why})
        simulated, seconds, verdict = self._about.virtual_time, max(r["seconds"] for r in reports), first["verdict"]
        samples = sum(r["samples"] for r in reports)
        known = self._known(_joined(self._about.curve, _curve_of(reports)))
        if verdict == "diverged":  # even a model of NaNs guesses some classes right
            known["time_to_target"] = None
        return Result(
            **known,
            verdict=verdict,
            seconds=first["real_seconds"] if simulated else seconds,
            virtual_seconds=seconds if simulated else None,
            samples_per_s=None if verdict == "diverged" else samples / max(seconds, 1e-9),
            words_per_s=self._words(samples / max(seconds, 1e-9)) if verdict != "diverged" else None,
            steps=first["steps_done"],
            epochs=first["epochs"],
            bytes_sent=sum(r["bytes_sent"] for r in everyone),
            staleness=staleness_summary(histogram),
            per_worker=[{k: r[k] for k in WORKER_KEYS if k in r} for r in reports],
            consensus_distance=first["consensus_distance"],
            parameters=first["parameters"],
            time_to_loss=_time_to_loss(reports),
            shared=_with_rate(first["shared"], seconds) if "shared" in first else None,
            compile_seconds=first.get("compile_seconds"),
            diverged_at_step=min((r["diverged_at_step"] for r in reports if r["diverged_at_step"]), default=None),
            state=self._state(),
        )

    def _cut_off(self, verdict: Verdict, error: str) -> dict[str, Any]:
        """The record of a run that did not end by itself: all is as of the last point of its learning curve."""
        curve = _joined([], self._curve)
        last = curve[-1] if curve else {"step": 0, "epoch": 0.0, "seconds": 0.0}
        record: dict[str, Any] = {f.name: None for f in dataclasses.fields(Result) if f.name != "state"}
        record |= self._known(curve)
        record[self._metric_key()] = record.pop("test_metric")
        return record | {
            "verdict": verdict,
            "error": error,
            "virtual_seconds" if self._about.virtual_time else "seconds": last["seconds"],
            "steps": last["step"],
            "epochs": last["epoch"],
            "per_worker": [{"steps": s.step, "samples": s.samples} for s in self._statuses],
        }

    def _known(self, curve: list[dict[str, Any]]) -> dict[str, Any]:
        """What is known of a run however it ended."""
        plan, task, key = self._about.plan, self._about.task, self._metric_key()
        last, target = curve[-1] if curve else {}, self._about.target
        reached = (
            point["seconds"]
            for point in curve
            if target is not None and point[key] is not None and task.reached(point[key], target)
        )
        return dict(
            task=plan.task or "task",
            strategy=plan.strategy,
            engine=self._about.engine,
            driver=plan.driver,
            workers=plan.workers,
            seed=plan.seed,
            train_loss=last.get("train_loss"),
            test_loss=last.get("test_loss"),
            metric=task.metric_name,
            test_metric=last.get(key),
            target=target,
            time_to_target=next(reached, None),
            curve=curve,
            versions=versions(),
            out=str(self._folder.path) if self._folder else None,
        )

    def _words(self, samples: float) -> float | None:
        """How many words so many samples are, where they are of a text."""
        each = self._about.task.words_a_sample()
        return None if each is None else each * samples

    def _state(self) -> dict[str, Tensor]:
        from safetensors.torch import load

        return load(self._model) if self._model else {}


def _curve_of(reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The points of all workers. Where they did not meet, only now is the loss since the point before known."""
    curve = _joined([], [point for report in reports for point in report["curve"]])
    for point in curve:
        stretch = str(-(-point["step"] // reports[0]["stride"]) - 1)
        sums = [report["stretches"][stretch] for report in reports if stretch in report["stretches"]]
        samples = sum(n for _, n, _ in sums)
        if sums and samples:
            loss = sum(total for total, _, _ in sums) / samples
            point["train_loss"] = loss if math.isfinite(loss) else None
    return curve


def _joined(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One learning curve, each of its points once; where both have one, the later counts."""
    points = {point["epoch"]: point for point in [*before, *after]}
    return [points[epoch] for epoch in sorted(points)]


def _with_rate(shared: dict[str, Any], seconds: float) -> dict[str, Any]:
    return {"updates": shared["updates"], "updates_per_s": shared["updates"] / max(seconds, 1e-9)} | shared


def _time_to_loss(reports: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """For each part of the initial loss, when the workers together were there; None is never."""
    rows = [torch.tensor(_numbers(report["losses"]), dtype=torch.float64) for report in reports]
    initial = reports[0]["initial_loss"]
    found = time_to_loss(math.inf if initial is None else initial, rows)
    return {f"{part:g}": found.get(part) for part in PARTS}


def _numbers(entries: Sequence[Sequence[float | None]]) -> list[list[float]]:
    """JSON has no infinity; null stands for it."""
    return [[math.inf if number is None else number for number in entry] for entry in entries]
