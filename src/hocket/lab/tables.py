"""What a comparison or a tuning found, as tables and sentences for people."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from rich.table import Table

from hocket.core.units import counted
from hocket.lab.axes import described, written
from hocket.lab.compare import Comparison, Row
from hocket.lab.runs import Runs, overlap
from hocket.lab.tune import Tuning
from hocket.run.train import brief
from hocket.strategies import strategy


def compared(comparison: Comparison) -> Table:
    """Medians with the smallest and the largest, the fastest to the target first."""
    rows = ranked(comparison)
    first = rows[0].runs.results[0]
    clock = "seconds" if first.virtual_seconds is None else "virtual s"
    names = ["strategy", "n", "engine", "driver"]
    if any(row.tuning for row in rows):
        names += ["tuned", "tuning cost"]
    if first.target is not None:
        names += [f"s to {first.target:g}", "reached"]
    found = _table([*names, f"test {first.metric}", clock, "samples/s", "MB sent"])
    for row in rows:
        runs = row.runs
        cells = [brief(row.strategy), str(row.workers), runs.results[0].engine, runs.results[0].driver]
        if "tuned" in names:
            cells += [described(row.tuned) or "–", cost(row.tuning) if row.tuning else "–"]
        if first.target is not None:
            cells += [_spread(runs.times, ".3g"), f"{runs.reached} of {len(runs.results)}"]
        sent = statistics.median(run.bytes_sent for run in runs.results) / 1e6
        cells += [_spread(runs.metrics, ".4f"), _spread(runs.seconds, ".3g"), _speed(runs), f"{sent:,.1f}"]
        found.add_row(*cells)
    return found


def ranked(comparison: Comparison) -> list[Row]:
    """The fastest to the target first, and then the better metric."""
    lower = comparison.lower_is_better
    return sorted(comparison.rows, key=lambda row: row.runs.order(lower))


def rule(comparison: Comparison) -> str:
    """How the runs were made, and when they stopped."""
    spec = comparison.spec
    length = f"{spec.steps:,} steps" if spec.steps is not None else counted(comparison.epochs, "epoch")
    ends = f"lasts {length}" if spec.target is None else f"stops at {spec.target:g}, or after {length}"
    return f"{counted(comparison.seeds, 'run')} of each, in turns; every run {ends}. Medians (least–most)."


def verdict(comparison: Comparison) -> str:
    """In words: which was the fastest to the target here, by how much, and whether the runs bear that out."""
    rows = ranked(comparison)
    first = rows[0].runs.results[0]
    if first.target is None:
        return "The task has no target; give one with --target to see which strategy reaches it first."
    there = [row for row in rows if math.isfinite(row.runs.order(False)[0])]
    if not there:
        return f"No strategy reached {first.target:g} in most of its runs."
    best, *others = there
    where = f"engine {first.engine}, {first.driver}"
    line = f"Fastest to {first.target:g} here ({where}): {_named(best)}, {_spread(best.runs.times, '.3g')} s"
    alone = next((row for row in others[1:] if strategy.make(row.strategy).most_workers == 1), None)
    if others:
        line += f", {_advantage(best, others[0], 'the next, ')}"
    if alone:
        line += f", and {_advantage(best, alone)}"
    return line + "."


def _advantage(best: Row, other: Row, role: str = "") -> str:
    """How many times as fast, and why that may be chance."""
    a, b = best.runs.times, other.runs.times
    ratio = statistics.median(b) / max(statistics.median(a), 1e-12)
    doubt = " (one run each)" if len(a) == 1 else " (their runs overlap: no clear difference)" if overlap(a, b) else ""
    return f"{ratio:.2f} times as fast as {role}{_named(other)}{doubt}"


def tuned(tuning: Tuning) -> Table:
    """The candidates, the best first."""
    result = tuning.ranking[0].runs.results[0]
    names = [*tuning.grid[0], "rung", "epochs", "runs"]
    if result.target is not None:
        names += [f"s to {result.target:g}", "reached"]
    found = _table([*names, f"{result.looks_at} {result.metric}", "verdict"])
    for candidate in tuning.ranking:
        runs = candidate.runs
        cells = [written(value) for value in candidate.values.values()]
        cells += [str(candidate.rung), f"{candidate.epochs:.3g}", str(len(runs.results))]
        if result.target is not None:
            cells += [_spread(runs.times, ".3g"), f"{runs.reached} of {len(runs.results)}"]
        found.add_row(*cells, _spread(runs.judged, ".4f"), "diverged" if runs.diverged else "")
    return found


def _table(columns: Sequence[str]) -> Table:
    found = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        is_text = column in ("strategy", "tuned", "engine", "driver")
        found.add_column(column, justify="left" if is_text else "right", no_wrap=column != "strategy", overflow="fold")
    return found


def cost(tuning: Tuning) -> str:
    return f"{tuning.samples:,} samples, {tuning.seconds:.3g} real s"


def _spread(values: Sequence[float], form: str) -> str:
    """The median, and between which values it lies; an infinite one is never."""
    if not values:
        return "–"
    middle, least, most = (
        format(value, form) if math.isfinite(value) else "never"
        for value in (statistics.median(values), min(values), max(values))
    )
    return middle if len(values) == 1 or least == most else f"{middle} ({least}–{most})"


def _speed(runs: Runs) -> str:
    """Of those that learnt something, and how many did not."""
    middle = f"{statistics.median(runs.speeds):,.0f}" if runs.speeds else "–"
    return f"{middle} ({runs.in_vain} of {len(runs.results)} learnt nothing)" if runs.in_vain else middle


def _named(row: Row) -> str:
    return f"{brief(row.strategy)} with {counted(row.workers, 'worker')}"
