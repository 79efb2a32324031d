"""`hocket compare`: several strategies on one task, by the same driver on the same engine, taking turns."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hocket.core.errors import UserError
from hocket.lab import axes
from hocket.lab.design import simulated_for
from hocket.lab.runs import Runs
from hocket.lab.tune import BUDGET, SEEDS_BEGIN, Tuning, tuning_of
from hocket.run.choice import best_engine, named_engine
from hocket.run.loading import absolute, find_name, load_task
from hocket.run.place import make_folder
from hocket.run.progress import Display
from hocket.run.spec import RunSpec
from hocket.run.train import brief, prepare
from hocket.strategies import strategy
from hocket.tasks import Task

EVALUATE_EVERY = 0.2
"""Epochs: the time to a target is no finer than the points of a curve."""


@dataclass
class Row:
    """One strategy with one number of workers: its runs, and how it was tuned before."""

    spec: RunSpec
    """Of its first run; the others have later seeds."""
    tuning: Tuning | None = None
    runs: Runs = field(default_factory=Runs)

    @property
    def strategy(self) -> str:
        return self.spec.strategy

    @property
    def workers(self) -> int:
        assert self.spec.workers is not None
        return self.spec.workers

    @property
    def tuned(self) -> axes.Values:
        return self.tuning.best if self.tuning else {}

    def tune(self, display: Display) -> None:
        if self.tuning:
            self.tuning.halve(display)
            self.spec = axes.applied(self.spec, self.tuning.best)

    def to_json(self) -> dict[str, Any]:
        runs = self.runs.results
        return {
            "strategy": self.strategy,
            "workers": self.workers,
            "engine": runs[0].engine if runs else self.spec.engine,
            "driver": runs[0].driver if runs else self.spec.driver,
            "tuned": dict(self.tuned) or None,
            "tuning": self.tuning.to_json() if self.tuning else None,
            "seconds": self.runs.seconds,
            "samples_per_s": [run.samples_per_s for run in runs],
            "test_metric": [run.test_metric for run in runs],
            "time_to_target": [run.time_to_target for run in runs],
            "bytes_sent": [run.bytes_sent for run in runs],
            "verdicts": [run.verdict for run in runs],
            "learnt": [run.learnt for run in runs],
            "folders": [run.out for run in runs],
        }


@dataclass
class Comparison:
    """The runs of a comparison: all can start, none has."""

    spec: RunSpec
    rows: list[Row]
    seeds: int
    epochs: float
    """How long each run is, unless it reaches its target."""
    lower_is_better: bool
    own: Task | None = None

    def run(self, out: Path | None, force: bool, display: Display) -> dict[str, Any]:
        """Tune each row if that was asked for, then run all, taking turns, so that a busy moment of the machine hits
        all alike. Writes a folder a run and compare.json, whose content it returns."""
        if out:
            make_folder(out, force)
        for row in self.rows:
            row.tune(display)
            self._write(out)
        for seed in range(self.spec.seed, self.spec.seed + self.seeds):
            for row, name in zip(self.rows, folders(self.rows), strict=True):
                training = prepare(dataclasses.replace(row.spec, seed=seed), self.own)
                folder = out / f"{name}-seed{seed}" if out else None
                row.runs.add(training.run(folder, force=force, display=display))
                self._write(out)
        return self.to_json()

    def _write(self, out: Path | None) -> None:
        if out:
            (out / "compare.json").write_text(json.dumps(self.to_json(), indent=1) + "\n")

    def to_json(self) -> dict[str, Any]:
        return {
            "task": self.spec.task,
            "seeds": list(range(self.spec.seed, self.spec.seed + self.seeds)),
            "stops_at": self.spec.target,
            "epochs": self.epochs,
            "rows": [row.to_json() for row in self.rows],
        }

    def warnings(self) -> list[str]:
        """A line for each thing that makes the comparison less fair than it looks."""
        return list(filter(None, [self._different_steps(), self._meetings()]))

    def _meetings(self) -> str:
        """A checkpoint is a meeting of all workers, which costs those who else never meet."""
        apart = [row.strategy for row in self.rows if row.workers > 1 and not strategy.make(row.strategy).lockstep]
        if not self.spec.checkpoint_every or not apart:
            return ""
        names = ", ".join(dict.fromkeys(apart))
        return f"For every checkpoint all workers meet, which costs time where they else do not: {names}. Leave it out."

    def _different_steps(self) -> str:
        """Where rows have one learning rate, but it means different things to them."""
        if any(row.tuning and "lr" in row.tuning.grid[0] for row in self.rows):
            return ""
        several = len({row.workers for row in self.rows if row.workers > 1}) > 1
        scales = {brief(row.strategy) + f" on {row.workers}" * several: _step_scale(row) for row in self.rows}
        if len(set(scales.values())) == 1:
            return ""
        told = ", ".join(f"{name} {scale:g}" for name, scale in scales.items())
        return (
            f"At one learning rate a sample moves the model by different amounts (serial is 1): {told}. "
            "Give each its own best rate with --tune lr."
        )


def _step_scale(row: Row) -> float:
    return strategy.make(row.strategy).step_scale(row.workers) * (row.workers if row.spec.scale_lr else 1)


def folders(rows: Sequence[Row]) -> list[str]:
    """How the folders of each row's runs begin. Rows may look alike: strategies in files of one name, long options."""
    plain = [re.sub("[:,/]", "-", brief(row.strategy)).replace("=", "")[:120] for row in rows]
    names = [f"{text}-{row.workers}" for text, row in zip(plain, rows, strict=True)]
    return [name if names.index(name) == i else f"{name}-row{i + 1}" for i, name in enumerate(names)]


def plan(
    spec: RunSpec,
    strategies: Sequence[str],
    workers: Sequence[int],
    seeds: int,
    tune: Sequence[str] = (),
    budget: float = BUDGET,
    own: Task | None = None,
) -> Comparison:
    """Every strategy with every number of workers that it runs with. Refuses what cannot run, before anything does."""
    if spec.strategy or spec.workers is not None:
        raise UserError("compare has a list of strategies and one of workers; give them as -s A -s B and -n 1,2")
    if not strategies:
        raise UserError("give a strategy at least, with --strategy")
    if not workers or min(workers) < 1:
        raise UserError(f"--workers must be numbers of 1 or more, such as 1,2,4; got {', '.join(map(str, workers))}")
    if seeds < 1:
        raise UserError(f"--seeds must be 1 or more runs of each strategy, got {seeds}")
    if own is None:
        load_task(spec.task, spec.seed, spec.data, spec.test_data)  # the user's file may define strategies too
    elif not spec.task:
        spec = dataclasses.replace(spec, task=find_name(own) or "")
    strategies = [absolute(name, strategy) for name in strategies]
    _check_twice(strategies, workers)
    wishes = axes.read(tune, strategies)
    rows = []
    for name in strategies:
        made = strategy.make(name)
        counts = dict.fromkeys(min(n, made.most_workers) for n in workers if n >= made.fewest_workers)
        rows += [Row(_spec_of(spec, name, n)) for n in counts]
    if not rows:
        raise UserError("none of these strategies runs with these numbers of workers; see --workers")
    _settle(rows, own)
    trainings = [prepare(row.spec, own) for row in rows]
    for row, training in zip(rows, trainings, strict=True):
        first_seed = spec.seed + max(SEEDS_BEGIN, seeds)
        row.tuning = tuning_of(training, wishes, budget, first_seed, own) if wishes else None
    return Comparison(spec, rows, seeds, trainings[0].epochs, trainings[0].task.lower_is_better, own)


def _spec_of(spec: RunSpec, name: str, workers: int) -> RunSpec:
    made = strategy.make(name)
    every = EVALUATE_EVERY if spec.evaluate_every is None else spec.evaluate_every
    chosen = named_engine(spec)[0] or None
    compress = spec.compress if made.sends else "none"
    spec = dataclasses.replace(spec, strategy=name, compress=compress, workers=workers)
    return dataclasses.replace(spec, engine=chosen, evaluate_every=every, sim=simulated_for(made, spec.sim))


def _check_twice(strategies: Sequence[str], workers: Sequence[int]) -> None:
    for what, names, given in (
        ("--workers", workers, list(workers)),
        ("--strategy", strategies, [strategy.make(name) for name in strategies]),
    ):
        if twice := [i for i, value in enumerate(given) if value in given[:i]]:
            raise UserError(f"{what} {names[twice[0]]} is given twice; every row must be another")


def _settle(rows: Sequence[Row], own: Task | None) -> None:
    """One driver and one engine for all, or implementations are compared: compiled where all can be."""
    driver = rows[0].spec.driver
    if driver == "auto":
        driver = "compiled" if all(_compiles(row.spec, own) for row in rows) else "pytorch"
    engine = rows[0].spec.engine
    if engine is None:
        needs = frozenset().union(*(strategy.make(row.strategy).needs for row in rows))
        engine, _ = best_engine(needs, compiled=driver == "compiled", named=bool(rows[0].spec.task))
    for row in rows:
        row.spec = dataclasses.replace(row.spec, driver=driver, engine=engine)


def _compiles(spec: RunSpec, own: Task | None) -> bool:
    try:
        return prepare(dataclasses.replace(spec, driver="compiled"), own).plan.compiled
    except UserError:
        return False
