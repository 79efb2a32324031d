"""Which figures a set of runs can be shown in."""

from __future__ import annotations

import dataclasses
import math
import shlex
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hocket.report.figures import Axis, Figure, Series
from hocket.report.records import Group, Naming, Record, by_target

_CURVES = 6
"""Lines that can be told apart at a glance; a reader may choose more."""
BARS = 40
"""As many as can be read below each other."""
_COMMANDS = 12
_WIDE = 5
"""Between the ends of the shortest and the longest run, from where on time is drawn on a log axis."""
_TAIL = 0.01
"""Of a histogram that may be left out where it is this many times as long as the rest:"""
_LONG = 2
_ROUNDING = 1e-5
"""Replicas that are no further apart differ in the order of their sums alone."""


Where = Callable[[Record, dict[str, float]], float | None]
"""Where a point of a run's curve stands."""


def command_of(groups: Sequence[Group]) -> str:
    """What makes these runs again."""
    lines = []
    for group in groups[:_COMMANDS]:
        first = group.first
        spec = shlex.quote(str(first.path / "spec.toml"))
        if first.spec:
            lines.append(
                f"hocket train --spec {spec}"
                + (f"  # and seed=N for {len(group.records)} seeds" * (len(group.records) > 1))
            )
    return "\n".join(lines)


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)


def begin_with(groups: Sequence[Group]) -> list[str]:
    """Of many groups the best and the best serial one: by time to the target, then by metric."""
    if len(groups) <= _CURVES + 2:
        return []
    sign = 1 if groups[0].first["lower_is_better"] else -1

    def order(group: Group) -> tuple[float, float]:
        metric = group.median("metric")
        return statistics.median(group.times), math.inf if metric is None else sign * metric

    ranked = sorted(groups, key=order)
    serial = [group for group in ranked if group.first["workers"] == 1][:1]
    best = [group for group in ranked if group not in serial][:_CURVES]
    return [group.name for group in [*best, *serial]]


def curves(
    groups: Sequence[Group],
    name: str,
    title: str,
    x: Axis,
    at: Where,
    y: Axis,
    key: str,
) -> Figure | None:
    """A learning curve a group: medians over its seeds at equal numbers of samples, with the range."""
    series = []
    for group in groups:
        whole = _together([_drawn(record, at, key) for record in group.good])
        if whole:
            found = [spread(values) for _, values in whole]
            several = len(group.good) > 1
            series.append(
                Series(
                    group.name,
                    [where for where, _ in whole],
                    [middle for middle, _, _ in found],
                    [low for _, low, _ in found] if several else [],
                    [high for _, _, high in found] if several else [],
                    points=len(whole) < 12,
                )
            )
    if not series:
        return None
    return Figure(name, title, "lines", x, y, series, command=command_of(groups), begins=begin_with(groups))


@dataclass(frozen=True)
class _Drawn:
    """What a run has at its numbers of samples: where it stands, and its value."""

    points: Mapping[float, tuple[float, float]]
    held: bool
    """Whether its last value holds beyond its end, since it stopped where it wanted to be."""


def _drawn(record: Record, at: Where, key: str) -> _Drawn:
    column = f"test_{record['metric']}" if key == "metric" else key
    found = ((point["samples"], at(record, point), point.get(column)) for point in record["curve"])
    points = {samples: (x, y) for samples, x, y in found if x is not None and y is not None}
    return _Drawn(points, record["verdict"] == "reached-target")


def _together(runs: Sequence[_Drawn]) -> list[tuple[float, list[float]]]:
    """Where the middle run stands and the values of all, at every number of samples at which all have one."""
    runs = [run for run in runs if run.points]
    found = []
    for samples in sorted({n for run in runs for n in run.points}):
        there = [run.points[samples] for run in runs if samples in run.points]
        ended = [run.points[last][1] for run in runs if run.held and (last := max(run.points)) < samples]
        if len(there) + len(ended) == len(runs):
            found.append((statistics.median(x for x, _ in there), [*(y for _, y in there), *ended]))
    return found


def learning(groups: Sequence[Group], clock: str) -> list[Figure]:
    """Metric and loss, against time, samples and bytes."""
    first = groups[0].first
    metric = Axis(f"test {first['metric']}", percent=first["metric"] == "accuracy")

    def seconds(_: Record, point: dict[str, float]) -> float | None:
        return point["seconds"]

    def samples(_: Record, point: dict[str, float]) -> float | None:
        return point["samples"]

    def megabytes(record: Record, point: dict[str, float]) -> float | None:
        total = record["curve"][-1]["samples"]
        return record["bytes_sent"] / 1e6 * point["samples"] / total if total and record["bytes_sent"] else None

    ends = [group.first["curve"][-1]["seconds"] for group in groups if group.first["curve"]]
    wide = ends and max(ends) > _WIDE * min(ends) > 0  # the quick ones would be a line at the left edge
    time, count = Axis(f"{clock}, s", "log" if wide else "linear"), Axis("samples of all workers together")
    judged, lost, kind = f"Test {first['metric']} against", "Training loss against", clock.split()[0]
    loss, sent = Axis("training loss", "log"), Axis("sent by all ranks, MB", "log")
    found = [
        curves(groups, f"metric-time-{kind}", f"{judged} time", time, seconds, metric, "metric"),
        curves(groups, f"loss-time-{kind}", f"{lost} time", time, seconds, loss, "train_loss"),
        curves(groups, f"metric-samples-{kind}", f"{judged} samples", count, samples, metric, "metric"),
        curves(groups, f"loss-samples-{kind}", f"{lost} samples", count, samples, loss, "train_loss"),
        curves(groups, f"metric-bytes-{kind}", f"{judged} bytes sent", sent, megabytes, metric, "metric"),
        curves(groups, f"loss-bytes-{kind}", f"{lost} bytes sent", sent, megabytes, loss, "train_loss"),
    ]
    return [figure for figure in found if figure]


def times_to_targets(groups: Sequence[Group], clock: str) -> list[Figure]:
    """One figure a target."""
    figures = (time_to_target(timed, clock) for timed in by_target(groups).values())
    found = [figure for figure in figures if figure is not None]
    return [dataclasses.replace(one, name=f"{one.name}-{n}" * (n > 1) or one.name) for n, one in enumerate(found, 1)]


def time_to_target(timed: Sequence[Group], clock: str) -> Figure | None:
    """Of groups with the same target."""
    if not any(group.reached for group in timed):
        return None
    timed = sorted(timed, key=lambda group: (statistics.median(group.times), -group.reached))
    dropped, timed = timed[BARS:], timed[:BARS]
    found = [spread(group.times) if group.reached == len(group.records) else None for group in timed]
    text = [f"{times[0]:.3g}" if times else _never(group) for group, times in zip(timed, found, strict=True)]
    middle, low, high = ([times[i] if times else None for times in found] for i in range(3))
    series = Series("time to target", [group.name for group in timed], middle, low, high, text=text)
    says = "Medians and ranges over seeds, where every run got there."
    says += f" The {len(dropped)} slowest of {len(dropped) + BARS} are in the table only." if dropped else ""
    return Figure(
        f"target-{clock.split()[0]}",
        f"Time to the target {timed[0].first['target']:g}",
        "bars",
        Axis(""),
        Axis(f"{clock}, s", zero=True),
        [series],
        says,
        command_of(timed),
    )


def _never(group: Group) -> str:
    return "never" if not group.reached else f"never in {len(group.records) - group.reached} of {len(group.records)}"


def speedup(groups: Sequence[Group], clock: str) -> Figure | None:
    """Samples a second over those of the best run on one core."""
    alone = [speed for group in groups if group.first.cores == 1 for speed in group.values("samples_per_s")]
    by_strategy: dict[str, list[Group]] = defaultdict(list)
    naming = Naming.of([group.first for group in groups])
    for group in groups:
        if group.first["workers"] and group.values("samples_per_s"):
            by_strategy[naming.name(group.first, ["workers"])].append(group)
    several = {
        name: sorted(g, key=lambda group: group.first["workers"]) for name, g in by_strategy.items() if len(g) > 1
    }
    if not alone or not several:
        return None
    base = max(alone)
    series = []
    for name, members in several.items():
        found = [spread([value / base for value in group.values("samples_per_s")]) for group in members]
        workers = [group.first["workers"] for group in members]
        series.append(
            Series(name, workers, [f[0] for f in found], [f[1] for f in found], [f[2] for f in found], points=True)
        )
    most = max(x for one in series for x in one.x)
    series.append(Series("ideal", [1, most], [1.0, float(most)], style="dashed", ideal=True))
    says = f"Samples a second of all workers over {base:,.0f}, the best run on one core."
    return Figure(
        f"speedup-{clock.split()[0]}",
        "Speedup",
        "lines",
        Axis("workers", "log", values=True),
        Axis("times one worker", "log"),
        series,
        says,
        command_of(groups),
    )


def staleness(groups: Sequence[Group]) -> Figure | None:
    series, cut = [], False
    for group in groups:
        counts: dict[int, int] = defaultdict(int)
        for record in group.good:
            for tau, count in ((record["staleness"] or {}).get("histogram") or {}).items():
                counts[int(tau)] += count
        total = sum(counts.values())
        if total and max(counts) > 0:
            last = _body(counts)
            cut = cut or last < max(counts)
            # Between counts that are far apart the line is at nought: its ends are enough.
            taus = sorted({near for tau in (0, *counts) for near in (tau - 1, tau, tau + 1) if 0 <= near <= last})
            series.append(
                Series(group.name, list(taus), [counts.get(tau, 0) / total for tau in taus], points=len(taus) < 40)
            )
    if not series:
        return None
    return Figure(
        "staleness",
        "How stale updates were",
        "lines",
        Axis("updates between read and write"),
        Axis("share of updates", zero=True, percent=True),
        series,
        f"The stalest {100 * _TAIL:g} % are left out where they are a long tail." if cut else "",
        command_of(groups),
        begins=_stalest(series),
    )


def _body(counts: Mapping[int, int]) -> int:
    """Where a histogram ends, without a tail that would press all the rest to the edge."""
    total, so_far, last = sum(counts.values()), 0, max(counts)
    for tau in sorted(counts):
        so_far += counts[tau]
        if so_far >= (1 - _TAIL) * total:
            return tau if last > _LONG * max(tau, 1) else last
    return last


def _stalest(series: Sequence[Series]) -> list[str]:
    """Some from the least stale to the stalest."""
    by_length = sorted(series, key=lambda one: one.x[-1])
    step = max(1, (len(by_length) - 1) // (_CURVES - 1))
    return [one.name for one in by_length[::step]] if len(series) > _CURVES + 2 else []


def consensus(groups: Sequence[Group]) -> Figure | None:
    apart = [(group, group.values("consensus_distance")) for group in groups]
    apart = [(group, values) for group, values in apart if values and max(values) > _ROUNDING][:BARS]
    if not apart:
        return None
    found = [spread(values) for _, values in apart]
    series = Series(
        "distance",
        [group.name for group, _ in apart],
        [f[0] for f in found],
        [f[1] for f in found],
        [f[2] for f in found],
        text=[f"{f[0]:.3g}" for f in found],
    )
    says = "Root mean square distance of the replicas from their mean, before the last average."
    return Figure(
        "consensus",
        "How far the workers' replicas were apart",
        "bars",
        Axis(""),
        Axis("distance", zero=True),
        [series],
        says,
        command_of(groups),
    )


def heat_maps(groups: Sequence[Group]) -> list[Figure]:
    """Batch against learning rate, one map for each of what else was varied, where both were."""
    by_name: dict[str, list[Group]] = defaultdict(list)
    naming = Naming.of([group.first for group in groups])
    for group in groups:
        if group.first.setting("batch") and group.first.setting("lr"):
            by_name[naming.name(group.first, ["batch", "lr"])].append(group)
    found: list[Figure] = []
    for name, members in by_name.items():
        batches = {group.first.setting("batch") for group in members}
        rates = {group.first.setting("lr") for group in members}
        if len(batches) < 2 or len(rates) < 2:
            continue
        cells = []
        for group in sorted(members, key=lambda g: (g.first.setting("batch"), g.first.setting("lr"))):
            value, failed = group.median("metric"), len(group.records) - len(group.good)
            text = f"{value:.3f}" if value is not None else f"{failed} failed"
            tip = f"{len(group.good)} of {len(group.records)} runs trained; median {text}"
            cells.append(
                {
                    "x": group.first.setting("batch"),
                    "y": group.first.setting("lr"),
                    "value": None if failed else value,
                    "text": text,
                    "tip": tip,
                }
            )
        says = "Crossed cells: some or all runs diverged or crashed."
        found.append(
            Figure(
                f"heat-{len(found)}",
                f"{name}: test {members[0].first['metric']}",
                "heat",
                Axis("batch of each worker"),
                Axis("learning rate"),
                [],
                says,
                command_of(members),
                cells,
            )
        )
    return found


def ring_steps(ranks: int = 5) -> Figure:
    """The two phases of the ring all-reduce: after each step, which part of each chunk's sum a rank holds."""
    held = [[1 / ranks] * ranks for _ in range(ranks)]
    steps: list[dict[str, Any]] = [
        {
            "title": "before: every rank has its own gradient, in chunks",
            "held": [row[:] for row in held],
            "sends": [None] * ranks,
        }
    ]
    for phase, words in ((0, "reduce-scatter"), (1, "all-gather")):
        for step in range(ranks - 1):
            sends = [(r - step + phase) % ranks for r in range(ranks)]
            before = [row[:] for row in held]
            for r in range(ranks):
                to, chunk = (r + 1) % ranks, sends[r]
                held[to][chunk] = before[r][chunk] + (before[to][chunk] if not phase else 0.0)
                if phase:
                    held[to][chunk] = 1.0
            title = f"{words}, step {step + 1} of {ranks - 1}: each rank sends one chunk to the next"
            steps.append({"title": title, "held": [[min(v, 1.0) for v in row] for row in held], "sends": sends})
    says = f"{ranks} ranks send 2 · ({ranks} − 1) chunks each: as few bytes as any all-reduce can."
    return Figure("ring", "The ring all-reduce, step by step", "ring", Axis(""), Axis(""), [], says, cells=steps)
