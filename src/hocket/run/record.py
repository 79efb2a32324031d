"""What the ranks tell, kept: the run's folder, the display and the Result."""

from __future__ import annotations

import dataclasses
import math
import time
import traceback as tb
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.core.errors import RankFailed
from hocket.core.status import Status
from hocket.drivers.plan import Goal, Plan
from hocket.drivers.report import model_bytes
from hocket.engines.catalogue import Listener
from hocket.measure.combined import combined
from hocket.measure.folder import RunFolder
from hocket.measure.losses import PARTS, time_to_loss
from hocket.measure.result import Result, Verdict, by_name, recorded, versions
from hocket.measure.timeline import Timeline
from hocket.run.blame import NothingTrained
from hocket.run.past import checkpoint_name
from hocket.run.progress import Display
from hocket.tasks import Task


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
    guess: float | None
    """The metric of always giving the most frequent class, where the metric is of classes."""
    curve: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Of a run that goes on, the points before."""
    best: dict[str, Any] | None = None
    """And the best model that it had, if it has one."""


class Recorder(Listener):
    """Hears the ranks, keeps the folder and the display up to date, and makes the Result."""

    def __init__(self, about: About, folder: RunFolder | None, display: Display, asked_s: float) -> None:
        """`asked_s` is when the run was asked for, by `time.monotonic`."""
        self._about, self._folder, self._display, self._asked_s = about, folder, display, asked_s
        self._startup_s: float | None = None
        self._curve = list(about.curve)
        self._statuses: Sequence[Status] = []
        self._model: dict[str, Tensor] = {}
        self._best_model: dict[str, Tensor] = {}
        self._told: dict[int, dict[str, Tensor]] = {}
        """Tensors of a model that each rank has told of so far."""
        self._best = about.best
        self._closed = False
        self._timeline = Timeline(about.plan.training_ranks) if about.plan.timeline else None

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
            case "begun" if self._startup_s is None:
                self._startup_s = time.monotonic() - self._asked_s
            case "events" if folder:
                for event in data["events"]:
                    folder.event(rank, event)
                if self._timeline:
                    self._timeline.add(rank, data["events"])
            case "point":
                again = any(point["epoch"] == data["epoch"] for point in self._curve)  # in a run made longer
                self._curve.append(data)
                looks_at = _looks_at(data)
                name = self._about.task.metric_name
                self._display.metric(f"{looks_at} {name}", data.get(f"{looks_at}_{name}"), data["train_loss"])
                if folder and not again:
                    folder.point(data)
            case "note":
                self._display.note(data["line"])
            case "tensor":
                before = self._told[rank] if data["number"] else {}
                self._told[rank] = before | _tensors(blob)
            case "model":
                self._model = state = self._told.pop(rank)
                if folder:
                    folder.model(model_bytes(state))
                    folder.vectors(lambda path: self._about.task.write(path, state))
            case "best" if self._about.task.is_better(data["metric"], self._best["metric"] if self._best else None):
                self._best, self._best_model = data, self._told.pop(rank)
                if folder:
                    folder.best(model_bytes(self._best_model, data))
            case "checkpoint" if folder:
                folder.checkpoint(checkpoint_name(data["step"]), blob)

    def output(self, line: str) -> None:
        self._display.note(line)

    def tick(self, statuses: Sequence[Status]) -> None:
        plan = self._about.plan  # servers have no progress of their own, nor has the rest of a split model
        self._statuses = statuses[: plan.training_ranks : plan.made_layout.ranks]
        if self._folder and any(status.step for status in self._statuses):
            self._folder.start()  # now the record may take the place of another
        self._display.update(self._statuses)

    def failed(self, failure: RankFailed) -> None:
        self._close(self._cut_off("crashed", f"{failure}\n{failure.traceback}".rstrip()))

    def _close(self, record: dict[str, Any]) -> str | None:
        """Write the record; returns one line on what could not be written, if anything."""
        if self._closed:
            return None
        self._closed = True
        if self._folder and self._timeline:
            self._folder.timeline(self._timeline.to_json())
        missing = self._folder.finish(record) if self._folder else None
        self._display.end(record)  # last, as whoever reads it may have gone
        return missing

    def _finished(self, everyone: list[dict[str, Any]]) -> Result:
        plan = self._about.plan
        parts, ranks, servers = plan.made_layout.ranks, everyone[: plan.training_ranks], everyone[plan.training_ranks :]
        reports = ranks[::parts]
        first = reports[0]
        if self._folder and (dropped := sum(r["dropped_events"] for r in everyone)):
            why = f"trace={plan.trace}"
            self._folder.event(-1, {"event": "not-logged", "count": dropped, "why": why})
        known = self._known(_joined(self._about.curve, _curve_of(reports)), first["tested"])
        known["time_to_loss"] = _time_to_loss(reports)
        if first["verdict"] == "diverged":  # even a model of NaNs guesses some classes right
            known["time_to_target"] = None
        known["learnt"] = first["verdict"] != "diverged" and self._learnt(known, first["initial_loss"])
        known |= combined(ranks, servers, simulated=self._about.virtual_time, parts=parts)
        if known["samples_per_s"] is not None and (each := self._about.task.words_a_sample()) is not None:
            known["words_per_s"] = each * known["samples_per_s"]
        return Result(**known, state=self._model, best_state=self._best_model)

    def _learnt(self, known: dict[str, Any], initial_loss: float | None) -> bool:
        metric, loss = known["test_metric"], known["train_loss"]
        if self._about.guess is not None and metric is not None:
            return bool(metric > self._about.guess)
        return initial_loss is None or loss is None or bool(loss < initial_loss)

    def _cut_off(self, verdict: Verdict, error: str) -> dict[str, Any]:
        """The record of a run that did not end by itself: all is as of the last point of its learning curve."""
        curve = _joined([], self._curve)
        last = curve[-1] if curve else {"step": 0, "epoch": 0.0, "seconds": 0.0}
        record: dict[str, Any] = dict.fromkeys(recorded()) | self._known(curve, {})
        return by_name(record) | {
            "verdict": verdict,
            "error": error,
            "virtual_seconds" if self._about.virtual_time else "seconds": last["seconds"],
            "steps": last["step"],
            "epochs": last["epoch"],
            "per_worker": [{"steps": s.step, "samples": s.samples} for s in self._statuses],
        }

    def _known(self, curve: list[dict[str, Any]], tested: dict[str, Any]) -> dict[str, Any]:
        """What is known of a run however it ended; `tested` is what was judged beside the curve in the end."""
        plan, task = self._about.plan, self._about.task
        last, target = curve[-1] if curve else {}, self._about.target
        looks_at = _looks_at(last)
        key = f"{looks_at}_{task.metric_name}"
        test = _measured(last | tested, "test")
        validation = _measured(last, "validation")
        train = _measured(tested, "train")
        train.pop("loss", None)  # of a run it is that of the way there
        goal = Goal.never() if target is None else Goal(target, task.lower_is_better)
        judged = [point for point in curve if point.get(key) is not None]
        reached = (point["seconds"] for point in judged if goal.reached(point[key]))
        return dict(
            task=plan.task or "task",
            strategy=plan.strategy,
            engine=self._about.engine,
            driver=plan.driver,
            workers=plan.training_ranks,
            layout=plan.layout,
            seed=plan.seed,
            train_loss=last.get("train_loss"),
            test_loss=test.pop("loss", None),
            metric=task.metric_name,
            test_metric=test.get(task.metric_name),
            metrics=test,
            lower_is_better=task.lower_is_better,
            looks_at=looks_at,
            validation_loss=validation.pop("loss", None),
            validation_metrics=validation,
            train_metrics=train,
            best=self._best,
            target=target,
            time_to_target=next(reached, None),
            curve=curve,
            startup_seconds=self._startup_s,
            versions=versions(),
            out=str(self._folder.path) if self._folder else None,
        )


def _tensors(blob: bytes) -> dict[str, Tensor]:
    from safetensors.torch import load

    return load(blob)


def _looks_at(point: dict[str, Any]) -> str:
    """Which samples the points of a learning curve are about."""
    return "validation" if "validation_loss" in point else "test"


def _measured(point: dict[str, Any], on: str) -> dict[str, Any]:
    """What was found on these samples, by name."""
    return {key.removeprefix(f"{on}_"): value for key, value in point.items() if key.startswith(f"{on}_")}


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


def _time_to_loss(reports: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """For each part of the initial loss, when the workers together were there; None is never."""
    rows = [torch.tensor(_numbers(report["losses"]), dtype=torch.float64) for report in reports]
    initial = reports[0]["initial_loss"]
    found = time_to_loss(math.inf if initial is None else initial, rows)
    return {f"{part:g}": found.get(part) for part in PARTS}


def _numbers(entries: Sequence[Sequence[float | None]]) -> list[list[float]]:
    """JSON has no infinity; null stands for it."""
    return [[math.inf if number is None else number for number in entry] for entry in entries]
