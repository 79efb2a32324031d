"""What a set of runs says, in words."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from hocket.report.records import Group, by_target


def verdict(groups: Sequence[Group], clock: str) -> list[str]:
    """Of runs that can be compared: one task, one kind of time. The first line says which."""
    groups = [group for group in groups if not group.first.going]
    if not groups:
        return []
    fastest = [line for target, timed in by_target(groups).items() for line in _fastest(target, timed, clock)]
    lines = [*(fastest or _best(groups)), *_failures(groups)]
    first, *others = lines or ["Nothing of these runs can be ranked: none has a target, and none failed."]
    about = f"{groups[0].first['task']}{', simulated' * clock.startswith('virtual')}"
    return [f"{about}: {first[0].lower()}{first[1:]}", *others]


def _fastest(value: float, timed: Sequence[Group], clock: str) -> list[str]:
    """Of groups with the same target."""
    there = sorted((g for g in timed if g.reached == len(g.records)), key=lambda group: statistics.median(group.times))
    target = f"A test {timed[0].first['metric']} of {value:g}"
    if not there:
        how = "in some runs, but in all of no setting" if any(group.reached for group in timed) else "in no run"
        return [f"{target} was reached {how}.", *_best(timed)]
    best, virtual = there[0], " (virtual time)" * clock.startswith("virtual")
    line = f"{target} was reached first by {best.name}, in {_told(best.times)}{virtual}"
    if len(there) > 1:
        second = there[1]
        ratio = statistics.median(second.times) / max(statistics.median(best.times), 1e-12)
        line += f", {ratio:.2f} times as fast as {second.name} with {_told(second.times)}"
        if min(second.times) <= max(best.times):
            line += "; their ranges overlap, so this order is not certain"
    lines = [line + "."]
    serial = [group for group in there if group.first.cores == 1]
    if serial and best.first.cores != 1:
        ratio = statistics.median(serial[0].times) / max(statistics.median(best.times), 1e-12)
        lines.append(f"That is {ratio:.2f} times as fast as the best run on one core, {serial[0].name}.")
    late = [f"{g.name} ({len(g.records) - g.reached} of {len(g.records)})" for g in timed if g.reached < len(g.records)]
    if late:
        lines.append(f"Never got there: {', '.join(late[:8])}{' and more' if len(late) > 8 else ''}.")
    return lines


def _best(groups: Sequence[Group]) -> list[str]:
    judged = [(group.median("metric"), group) for group in groups if group.values("metric")]
    if not judged:
        return []
    first = judged[0][1].first
    value, group = first.best(judged, key=lambda entry: entry[0] or 0.0)
    return [f"The best test {first['metric']} in the end was {value:.4g}, by {group.name}."]


def _failures(groups: Sequence[Group]) -> list[str]:
    lines = []
    for word in ("diverged", "crashed", "interrupted"):
        hit = [
            f"{g.name} ({n} of {len(g.records)})" for g in groups if (n := sum(r["verdict"] == word for r in g.records))
        ]
        if hit:
            lines.append(f"{word.capitalize()}: {', '.join(hit[:8])}{' and more' if len(hit) > 8 else ''}.")
    return lines


def _told(times: Sequence[float]) -> str:
    middle = f"{statistics.median(times):.3g} s"
    return middle if len(times) == 1 else f"{middle} (median of {len(times)}, {min(times):.3g} to {max(times):.3g})"
