"""Figures that a study asks for: one measure of its runs against a setting, or against another measure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hocket.core.errors import UserError
from hocket.core.registry import unknown
from hocket.measure.result import COMMUNICATION, TIMES
from hocket.report.charts import command_of, spread
from hocket.report.figures import Axis, Figure, Series
from hocket.report.records import Group, Naming, Record
from hocket.run.spec import settings


def _share(*names: str) -> Callable[[Record], float | None]:
    def of(record: Record) -> float | None:
        workers = [worker for worker in record["per_worker"] if TIMES[0] in worker]
        total = sum(worker["seconds"] for worker in workers)
        return sum(worker[name] for worker in workers for name in names) / total if total else None

    return of


def _epochs_to_target(record: Record) -> float | None:
    name, target = f"{record['looks_at'] or 'test'}_{record['metric']}", record["target"]
    for point in record["curve"] if target is not None else ():
        value = point.get(name)
        if value is not None and record.best(value, target) == value:
            return float(point["epoch"])
    return None


def _per_epoch(record: Record) -> float | None:
    return record.seconds / record["epochs"] if record.seconds and record["epochs"] else None


def _in_a_step(name: str) -> Callable[[Record], float | None]:
    """Seconds of a worker, as it counts them itself."""

    def of(record: Record) -> float | None:
        found = [worker[name] for worker in record["per_worker"] if name in worker]
        return statistics.fmean(found) / record["steps"] if found and record["steps"] else None

    return of


def _part(part: str) -> Callable[[Record], float | None]:
    return lambda record: (record["time_to_loss"] or {}).get(part)


_OF_A_RUN: dict[str, tuple[str, Callable[[Record], Any]]] = {
    "metric": ("test {metric}", lambda record: record.metric),
    "train_metric": ("training {metric}", lambda record: record[f"train_{record['metric']}"]),
    "train_loss": ("training loss", lambda record: record["train_loss"]),
    "seconds": ("{clock}, s", lambda record: record.seconds),
    "seconds_per_epoch": ("{clock} of an epoch, s", _per_epoch),
    "seconds_per_step": ("{clock} of a step, s", _in_a_step("seconds")),
    "samples_per_s": ("samples a second", lambda record: record["samples_per_s"]),
    "words_per_s": ("words a second", lambda record: record["words_per_s"]),
    "megabytes": ("sent by all ranks, MB", lambda record: (record["bytes_sent"] or 0) / 1e6),
    "staleness": ("mean staleness, updates", lambda record: (record["staleness"] or {}).get("mean")),
    "time_to_target": ("{clock} to the target, s", lambda record: record["time_to_target"]),
    "epochs_to_target": ("epochs to the target", _epochs_to_target),
    "time_to_half_loss": ("{clock} to half the initial loss, s", _part("50")),
    "time_to_tenth_loss": ("{clock} to a tenth of the initial loss, s", _part("10")),
    "communicating": ("share of time in communication", _share("sending", "transferring", "waiting")),
    "travelling": ("communication in a step, s", _in_a_step(COMMUNICATION[0])),
    "exposed": ("exposed communication in a step, s", _in_a_step(COMMUNICATION[1])),
    "waiting": ("share of time waiting for others or locks", _share("waiting", "locks")),
    "lock_wait": ("lock wait of all workers, s", lambda record: (record["shared"] or {}).get("lock_wait_s")),
    "distance": ("distance of replicas", lambda record: record["consensus_distance"]),
}
_SHARES = ("communicating", "waiting", "failed", "never")
_OF_A_GROUP: dict[str, tuple[str, Callable[[Group], float]]] = {
    "failed": ("share of runs that crashed or diverged", lambda g: 1 - len(g.good) / len(g.records)),
    "never": ("share of runs that never got to the target", lambda g: 1 - g.reached / len(g.records)),
}
MEASURES = (*_OF_A_RUN, *_OF_A_GROUP)
_PLACES: dict[str, Callable[[Record], int | None]] = {
    "workers": lambda record: record["workers"],
    "cores": lambda record: record.cores,
}
"""What else than a setting as it was asked for a line may run along."""
_TO_A_GOAL = ("time_to_target", "epochs_to_target", "time_to_half_loss", "time_to_tenth_loss")
"""Measures that a run may never have: a median over those that do would flatter."""


def measured(group: Group, measure: str) -> tuple[float, float, float] | None:
    """Median and range over the runs that did not fail; of the way to a goal, only if all runs got there."""
    if measure in _OF_A_GROUP:
        value = _OF_A_GROUP[measure][1](group)
        return value, value, value
    found = [_OF_A_RUN[measure][1](record) for record in group.good]
    values = [float(value) for value in found if value is not None]
    if not values or (measure in _TO_A_GOAL and len(values) < len(group.records)):
        return None
    return spread(values)


def axis_of(measure: str, record: Record, clock: str, log: bool) -> Axis:
    words = (_OF_A_RUN | _OF_A_GROUP)[measure][0] if measure in MEASURES else measure.replace("_", " ")
    percent = measure in _SHARES or (measure in ("metric", "train_metric") and record["metric"] == "accuracy")
    zero = measure in _SHARES and not log
    label = words.format(metric=record["metric"], clock=clock)
    return Axis(label, "log" if log else "linear", zero, percent, values=measure not in MEASURES)


def across(groups: Sequence[Group], asked: Mapping[str, Any], clock: str, number: int) -> Figure | None:
    """A figure as a study's file asks for it: `x` and `y`, a line for each of what else was varied.

    Where x is a measure, a group is a point. Settings that are `tied` to x change along with it, on one line.
    """
    x, y, log = asked["x"], asked["y"], asked.get("log", "")
    groups = [group for group in groups if not group.first.going]
    if not groups:
        return None
    first = groups[0].first
    lines: dict[str, list[tuple[Any, tuple[float, float, float]]]] = defaultdict(list)
    missing, shown, naming = [], [], Naming.of([group.first for group in groups])
    for group in groups:
        at: Any
        if x in MEASURES:
            middle = measured(group, x)
            at, name = middle and middle[0], group.name
        else:
            at = _PLACES[x](group.first) if x in _PLACES else group.first.setting(x)
            name = naming.name(group.first, [x, *asked.get("tied", [])])
        if at is None or isinstance(at, (str, bool, dict)):
            continue
        found = measured(group, y)
        shown.append(group)
        if found is None:
            missing.append(group.name)
        else:
            lines[name].append((at, found))
    series = [_series(name, sorted(points, key=lambda p: p[0])) for name, points in lines.items()]
    if not series or (x not in MEASURES and max(len(one.x) for one in series) < 2):
        return None
    series += [Series(**entry, style="dashed", points=True, ideal=True) for entry in asked.get("published", [])]
    says = asked.get("says", "")
    if missing:
        says += f" No value, as some or all runs never got there or failed: {', '.join(missing[:6])}"
        says += f" and {len(missing) - 6} more." if len(missing) > 6 else "."
    name = f"{y}-against-{x}-{clock.split()[0]}-{number}".replace("_", "-")
    return Figure(
        name, asked["title"], "lines", axis_of(x, first, clock, "x" in log), axis_of(y, first, clock, "y" in log),
        series, says.strip(), command_of(shown), begins=[] if x in MEASURES else _few(series),
    )  # fmt: skip


def _few(series: Sequence[Series]) -> list[str]:
    """Of very many lines the last of each strategy, which has the most workers, and what is published."""
    if len(series) <= 10:
        return []
    last = {one.name.partition(" ")[0]: one.name for one in series if not one.ideal}
    return [*last.values(), *(one.name for one in series if one.ideal)]


def check(figures: Sequence[Mapping[str, Any]]) -> None:
    """Refuse what cannot be drawn, before anything runs."""
    for figure in figures:
        for key in ("title", "x", "y"):
            if not isinstance(figure.get(key), str):
                raise UserError(f"a [[figure]] needs {key} = TEXT; got {figure.get(key)!r}")
        if figure["y"] not in MEASURES:
            raise UserError(f"a figure's y: {unknown('measure', figure['y'], MEASURES)}")
        if figure["x"] not in (known := (*settings(), *_PLACES, *MEASURES)):
            raise UserError(f"a figure's x: {unknown('setting or measure', figure['x'], known)}")


def _series(name: str, points: Sequence[tuple[Any, tuple[float, float, float]]]) -> Series:
    merged: dict[Any, list[tuple[float, float, float]]] = defaultdict(list)
    for at, found in points:
        merged[at].append(found)
    rows = [(at, statistics.median(f[0] for f in fs), min(f[1] for f in fs), max(f[2] for f in fs))
            for at, fs in merged.items()]  # fmt: skip
    middle: list[float | None] = [row[1] for row in rows]
    return Series(name, [row[0] for row in rows], middle, [r[2] for r in rows], [r[3] for r in rows], points=True)
