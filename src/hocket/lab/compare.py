"""`hocket compare`: several strategies on one task, interleaved, in one table."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from hocket.core.errors import UserError
from hocket.measure.result import Result
from hocket.run.loading import load_task
from hocket.run.progress import Display
from hocket.run.spec import RunSpec
from hocket.run.train import prepare
from hocket.strategies import strategy


@dataclass
class Row:
    """All runs of one strategy with one number of workers."""

    strategy: str
    workers: int
    runs: list[Result]

    def values(self, key: str) -> list[float]:
        found = [getattr(run, key) for run in self.runs]
        return [value for value in found if value is not None]

    @property
    def time_to_target(self) -> float | None:
        """The median, if every run reached the target."""
        times = self.values("time_to_target")
        return statistics.median(times) if len(times) == len(self.runs) else None

    @property
    def seconds(self) -> list[float]:
        return [run.seconds if run.virtual_seconds is None else run.virtual_seconds for run in self.runs]

    def to_json(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy,
            "workers": self.workers,
            "engine": self.runs[0].engine,
            "seconds": self.seconds,
            "samples_per_s": self.values("samples_per_s"),
            "test_metric": [run.test_metric for run in self.runs],
            "time_to_target": [run.time_to_target for run in self.runs],
            "bytes_sent": self.values("bytes_sent"),
            "verdicts": [run.verdict for run in self.runs],
            "folders": [run.out for run in self.runs],
        }


@dataclass
class Grid:
    """The runs of a comparison: all can start, none has."""

    spec: RunSpec
    rows: list[Row]
    seeds: range

    def run_spec(self, row: Row, seed: int) -> RunSpec:
        sim = self.spec.sim
        if strategy.make(row.strategy).most_workers == 1:  # who is alone has no slower worker
            sim = {key: value for key, value in sim.items() if key != "stragglers"}
        return dataclasses.replace(self.spec, strategy=row.strategy, workers=row.workers, seed=seed, sim=sim)


def plan(spec: RunSpec, strategies: Sequence[str], workers: Sequence[int], seeds: int) -> Grid:
    """Every strategy with every number of workers that it runs with. Refuses what cannot run, before anything does."""
    if min(workers) < 1 or seeds < 1:
        raise UserError("--workers and --seeds must be 1 or more")
    load_task(spec.task, spec.seed, spec.data, spec.test_data)  # the user's file may define strategies too
    for what, given in (("--workers", workers), ("--strategy", [strategy.make(name) for name in strategies])):
        if twice := [i for i, value in enumerate(given) if value in given[:i]]:
            names = strategies if what == "--strategy" else workers
            raise UserError(f"{what} {names[twice[0]]} is given twice; every row must be another")
    grid = Grid(spec, [], range(spec.seed, spec.seed + seeds))
    for name in strategies:
        made = strategy.make(name)
        counts = dict.fromkeys(min(n, made.most_workers) for n in workers if n >= made.fewest_workers)
        grid.rows += [Row(name, n, []) for n in counts]
    if not grid.rows:
        raise UserError("none of these strategies runs with these numbers of workers; see --workers")
    for row in grid.rows:
        prepare(grid.run_spec(row, spec.seed))
    return grid


def compare(grid: Grid, out: Path, force: bool, display: Display) -> dict[str, Any]:
    """Run all rows, taking turns, so that a busy moment of the machine hits all alike. Writes a folder a run and
    compare.json, which it returns."""
    try:
        out.mkdir(parents=True, exist_ok=force)
    except FileExistsError:
        raise UserError(f"{out} exists already; choose another --out, or replace the runs in it with --force") from None
    except OSError as error:
        raise UserError(f"cannot make the folder {out}: {error.strerror}; choose another --out") from None
    record: dict[str, Any] = {}
    for seed in grid.seeds:
        for row in grid.rows:
            text = row.strategy.replace(":", "-").replace(",", "-").replace("=", "").replace("/", "-")
            folder = out / f"{text[:120]}-{row.workers}-seed{seed}"
            row.runs.append(prepare(grid.run_spec(row, seed)).run(folder, force=force, display=display))
            record = {"task": grid.spec.task, "rows": [r.to_json() for r in grid.rows if r.runs]}
            (out / "compare.json").write_text(json.dumps(record, indent=1) + "\n")
    return record


def table(rows: Sequence[Row]) -> Table:
    """Medians, and half of what lies between the smallest and the largest."""
    first = rows[0].runs[0]
    clock = "seconds" if first.virtual_seconds is None else "virtual s"
    to_target = f"to {first.target:g}" if first.target is not None else "to target"
    found = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("strategy", "n", "engine", clock, "samples/s", f"test {first.metric}", to_target, "MB sent"):
        is_name = column == "strategy"
        found.add_column(column, justify="left" if is_name else "right", no_wrap=not is_name, overflow="fold")
    for row in rows:
        reached = row.time_to_target
        found.add_row(
            row.strategy,
            str(row.workers),
            row.runs[0].engine,
            _spread(row.seconds, ".3f"),
            f"{statistics.median(row.values('samples_per_s')):,.0f}",
            _spread(row.values("test_metric"), ".4f"),
            "–" if reached is None else f"{reached:.3g}",
            f"{statistics.median(row.values('bytes_sent')) / 1e6:,.1f}",
        )
    return found


def _spread(values: Sequence[float], form: str) -> str:
    if not values:
        return "–"
    middle = format(statistics.median(values), form)
    return middle if len(values) == 1 else f"{middle} ±{format((max(values) - min(values)) / 2, form)}"


def verdict(rows: Sequence[Row]) -> str:
    """In words: which was the fastest to the target here, and by how much."""
    target = rows[0].runs[0].target
    if target is None:
        return "The task has no target; give one with --target to see which strategy reaches it first."
    reached = sorted((row.time_to_target, i) for i, row in enumerate(rows) if row.time_to_target is not None)
    if not reached:
        return f"No strategy reached {target:g} in every run."
    best = rows[reached[0][1]]
    line = f"Fastest to {target:g} here: {best.strategy} with {_workers(best.workers)}, {reached[0][0]:.3g} s"
    if len(reached) > 1:
        second = rows[reached[1][1]]
        times = reached[1][0] / max(reached[0][0], 1e-12)
        line += f", {times:.2f} times as fast as the next, {second.strategy} with {_workers(second.workers)}"
    alone = next((row for row in rows if strategy.make(row.strategy).most_workers == 1), None)
    if alone is not None and alone.time_to_target is not None and best is not alone:
        times = alone.time_to_target / max(reached[0][0], 1e-12)
        line += f", and {times:.2f} times as fast as {alone.strategy}"
    return line + "."


def _workers(n: int) -> str:
    return "1 worker" if n == 1 else f"{n} workers"
