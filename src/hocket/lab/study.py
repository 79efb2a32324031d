"""Run a study: every cell with every seed, once; what is finished already is left as it is."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hocket.core.errors import RankFailed, UserError
from hocket.engines.binding import allowed_cores
from hocket.lab.design import Cell, Study, simulated_for
from hocket.measure import disk
from hocket.run.loading import absolute
from hocket.run.place import make_folder
from hocket.run.progress import Display
from hocket.run.spec import RunSpec, read_toml
from hocket.run.train import prepare
from hocket.strategies import strategy
from hocket.tasks import task

RUNS = "runs"
STUDY = "study.json"


@dataclass
class Outcome:
    """What a study has come to: its runs in the order of the cells, and what is not among them."""

    folders: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Pace:
    """How long runs take, and so those that are left."""

    left: list[tuple[Cell, int]]
    took_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def took(self, cell: Cell, seconds: float) -> None:
        self.took_s[cell.folder(0)].append(seconds)

    def told(self) -> str:
        """The time left: a cell's own where one of its runs is over, else the mean of the others."""
        if not self.took_s or not self.left:
            return ""
        usual = statistics.fmean(s for times in self.took_s.values() for s in times)
        known = {name: statistics.fmean(times) for name, times in self.took_s.items()}
        seconds = sum(known.get(cell.folder(0), usual) for cell, _ in self.left)
        return f", about {_duration(seconds)} left"


def run(study: Study, out: Path, display: Display, only: Mapping[str, str] | None = None) -> Outcome:
    """Run what is not finished yet. A study that was killed loses the run that was going on, and nothing else. `only`
    cells with these settings get their turn now, where some are wanted."""
    chosen = _with_settings(study, only or {})
    make_folder(out, force=True)
    write_down(out, study, over=False)  # for who looks while it goes on
    impossible: dict[str, list[str]] = defaultdict(list)
    refused: set[str] = set()
    missing = [(cell, seed) for cell, seed in study.runs() if not finished(out / RUNS / cell.folder(seed), cell, seed)]
    total = len(study.cells) * study.seeds
    if len(missing) < total:
        display.note(f"{total - len(missing)} of {total} runs are there already")
    todo = [(cell, seed) for cell, seed in missing if cell in chosen]
    if for_later := len(missing) - len(todo):
        display.note(f"{for_later} of {total} runs are left for another time")
    pace = Pace(todo)
    while pace.left:
        cell, seed = pace.left[0]
        number = total - for_later - len(pace.left) + 1
        if cell.folder(0) not in refused:
            display.note(f"run {number} of {total - for_later}{pace.told()}")
            began = time.monotonic()
            if reason := _run_one(cell, seed, out, display):
                refused.add(cell.folder(0))
                impossible[reason].append(cell.name)
                display.note(f"left out: {cell.name}: {reason}")
            else:
                pace.took(cell, time.monotonic() - began)
        pace.left.pop(0)
    found = [out / RUNS / cell.folder(seed) for cell in study.cells for seed in range(study.seeds)]
    notes = [f"{', '.join(names)}: {reason}" for reason, names in impossible.items()]
    if for_later:
        notes.append(f"{for_later} of {total} runs, for another time; the same command without --only goes on")
    return Outcome([folder for folder in found if (folder / "result.json").is_file()], notes)


def _with_settings(study: Study, only: Mapping[str, str]) -> list[Cell]:
    """The cells that have these settings."""
    chosen = study.cells
    for key, value in only.items():
        there = sorted({str(cell.values[key]) for cell in study.cells if key in cell.values})
        if value not in there:
            has = f"it has {', '.join(there)}" if there else "none of its runs sets that"
            raise UserError(f"--only {key}={value} leaves nothing of the study {study.name}; {has}")
        chosen = [cell for cell in chosen if str(cell.values.get(key)) == value]
    if only and not chosen:
        wanted = " ".join(f"{key}={value}" for key, value in only.items())
        raise UserError(f"--only {wanted}: no run of the study {study.name} has all of these")
    return chosen


def _run_one(cell: Cell, seed: int, out: Path, display: Display) -> str:
    """Train; or say why this cell is none that can run here."""
    try:
        spec = _wanted(cell, seed)
        cores = len(allowed_cores())
        threads = strategy.make(spec.strategy).threads if spec.strategy else 1
        if cell.within_cores and (spec.workers or 1) * threads > cores:
            return f"this machine has {cores} cores, and real workers are not more than that"
        training = prepare(spec)
    except UserError as error:
        return str(error)
    try:
        training.run(out / RUNS / cell.folder(seed), force=True, display=display)
    except RankFailed as failure:  # it is in the record
        display.note(f"failed: {cell.name}: {' '.join(str(failure).split())}")
    return ""


def finished(folder: Path, cell: Cell, seed: int) -> bool:
    """Whether this very run is over."""
    try:
        verdict = json.loads((folder / "result.json").read_text())["verdict"]
        found, asked = RunSpec.from_mapping(read_toml(folder / "spec.toml")), _wanted(cell, seed)
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return False
    same = all(getattr(found, name) == getattr(asked, name) for name in ("seed", *cell.values))
    return same and verdict != "interrupted"


def _wanted(cell: Cell, seed: int) -> RunSpec:
    """What its run is asked for, as the run's record has it."""
    spec = cell.spec(seed)
    spec = dataclasses.replace(spec, task=absolute(spec.task, task), strategy=absolute(spec.strategy, strategy))
    if not spec.strategy:
        return spec
    return dataclasses.replace(spec, sim=simulated_for(strategy.make(spec.strategy), spec.sim))


def write_down(
    out: Path, study: Study, notes: Sequence[str] = (), rows: Sequence[Mapping[str, Any]] = (), *, over: bool
) -> None:
    """What was asked, what was left out, and what was measured beside trainings: all that a report needs but runs."""
    content: dict[str, Any] = {
        "study": study.name,
        "question": study.question,
        "says": study.says,
        "seeds": study.seeds,
        "cells": [dict(cell.values) for cell in study.cells],
        "figures": study.figures,
        "draws": study.draws,
        "notes": list(notes),
        "rows": list(rows),
        "over": over,
    }
    disk.write(out / STUDY, (json.dumps(content, indent=1) + "\n").encode())


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
