"""What a study is: a question, and the grid of runs that answers it, read from a TOML file."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from hocket.core.errors import UserError
from hocket.core.registry import unknown
from hocket.run.spec import RunSpec, override, read_toml, settings
from hocket.run.train import brief
from hocket.strategies import Strategy

_KEYS = ("question", "says", "seeds", "settings", "grid", "figure", "quick", "collectives", "draws")
_FIGURE = ("title", "x", "y", "log", "tied", "says", "published")
_OF_A_GRID = ("within_cores",)
"""Keys of a grid that are no settings: whether workers are real cores."""
_LONGEST_NAME = 80
_USUAL = {
    "task",
    "strategy",
    "workers",
    "engine",
    "epochs",
    "steps",
    "target",
    "evaluate_every",
    "train_metrics",
    "trace",
}
"""Settings that a cell's name leaves out, or has in other words."""


@dataclass(frozen=True)
class Cell:
    """One point of the grid: what its runs are asked for, whatever the seed."""

    values: Mapping[str, Any]
    within_cores: bool = False

    def spec(self, seed: int) -> RunSpec:
        return RunSpec.from_mapping({**self.values, "seed": seed})

    @property
    def name(self) -> str:
        """For people: what tells a cell from most others."""
        spec = self.spec(0)
        words = [brief(spec.strategy), f"× {spec.workers}" if spec.workers else "", spec.engine or ""]
        words += [f"{key}={_short(value)}" for key, value in self.values.items() if key not in _USUAL]
        return " ".join(filter(None, words))

    def folder(self, seed: int) -> str:
        """Of its run with this seed: the same in every start of a study, and another for other settings."""
        exact = json.dumps({**self.values, "seed": seed}, sort_keys=True, default=str)
        text = self.name.replace("× ", "")
        readable = "".join(c if c.isalnum() or c in "-_." else "-" for c in text)[:_LONGEST_NAME]
        return f"{readable}-seed{seed}-{hashlib.sha256(exact.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Study:
    """All of it, decided: nothing has been checked against tasks, strategies and engines yet."""

    name: str
    question: str
    says: str
    cells: list[Cell]
    seeds: int
    figures: list[dict[str, Any]] = field(default_factory=list)
    """What its report shows beside the usual figures: see report/across.py."""
    draws: list[str] = field(default_factory=list)
    """Figures that need no run."""
    collectives: dict[str, Any] = field(default_factory=dict)
    """What of the collectives is measured; see lab/collectives_study.py."""

    def runs(self) -> Iterator[tuple[Cell, int]]:
        """Seed by seed, so that a busy moment of the machine hits all cells alike."""
        return ((cell, seed) for seed in range(self.seeds) for cell in self.cells)


def built_in() -> dict[str, str]:
    """The studies that come with Hocket: their names and questions."""
    found = sorted(
        (entry for entry in files("hocket.lab.studies").iterdir() if entry.name.endswith(".toml")), key=lambda e: e.name
    )
    return {entry.name.removesuffix(".toml"): read_toml(Path(str(entry)))["question"] for entry in found}


def find(name: str) -> Path:
    """The file of a built-in study, or the user's own."""
    if name.endswith(".toml"):
        return Path(name)
    known = built_in()
    if name not in known:
        raise UserError(f"{unknown('study', name, known)}; a file of your own ends in .toml")
    return Path(str(files("hocket.lab.studies") / f"{name}.toml"))


def read(path: Path, quick: bool, changes: Mapping[str, Any] | None = None) -> Study:
    """The study that a file describes. `quick` narrows it as the file says; `changes` are settings that win."""
    given = read_toml(path)
    _check(given, path)
    less: dict[str, Any] = dict(given.get("quick", {})) if quick else {}
    seeds = less.pop("seeds", given.get("seeds", 1))
    if type(seeds) is not int or seeds < 1:
        raise UserError(f"{path}: seeds must be 1 or more runs of each cell, got {seeds}")
    _check_quick(given.get("grid", []), less, path)
    cells = [
        cell for grid in given.get("grid", []) for cell in _cells(given.get("settings", {}), grid, less, changes or {})
    ]
    cells = list({json.dumps(cell.values, sort_keys=True, default=str): cell for cell in cells}.values())
    for cell in cells:
        try:
            cell.spec(0)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
    collectives = {**given.get("collectives", {}), **less.get("collectives", {})} if "collectives" in given else {}
    if not cells and not collectives:
        raise UserError(f"{path}: there is no run in this study; give it a [[grid]] with a strategy at least")
    about = {key: str(given.get(key, "")) for key in ("question", "says")}
    figures, draws = given.get("figure", []), given.get("draws", [])
    return Study(path.stem, **about, cells=cells, seeds=seeds, figures=figures, draws=draws,
                 collectives=collectives)  # fmt: skip


def _check(given: Mapping[str, Any], path: Path) -> None:
    """Refuse keys that mean nothing here: settings are checked with the cells."""
    for key in given:
        if key not in _KEYS:
            raise UserError(f"{path}: {unknown('key of a study', key, _KEYS)}")
    for key, kind in (("grid", list), ("figure", list), ("settings", dict), ("quick", dict), ("collectives", dict)):
        if not isinstance(given.get(key, kind()), kind):
            raise UserError(f"{path}: {key} must be {'[[' + key + ']]' if kind is list else '[' + key + ']'}")
    for table, known in ((given.get("figure", []), _FIGURE), (given.get("grid", []), (*settings(), *_OF_A_GRID))):
        for entry in table:
            for key in entry:
                if key not in known:
                    raise UserError(f"{path}: {unknown('setting', key, known)}")


def _check_quick(grids: Sequence[Mapping[str, Any]], less: Mapping[str, Any], path: Path) -> None:
    """Refuse lists that leave nothing anywhere: a grid without any of the values is meant to be left out."""
    for key, kept in less.items():
        if not isinstance(kept, list):
            continue
        axes = [grid[key] if isinstance(grid[key], list) else [grid[key]] for grid in grids if key in grid]
        if not any(value in kept for axis in axes for value in axis):
            raise UserError(f"{path}: [quick] leaves {kept} of {key}, but no [[grid]] has any of these")


def _cells(
    base: Mapping[str, Any], grid: Mapping[str, Any], less: Mapping[str, Any], changes: Mapping[str, Any]
) -> Iterator[Cell]:
    """All combinations of a grid's lists. Of `less`, a list leaves those values of an axis, a value replaces it."""
    axes = {key: value if isinstance(value, list) else [value] for key, value in grid.items() if key not in _OF_A_GRID}
    fixed = {}
    for key, value in less.items():
        if isinstance(value, list):
            if key in axes:
                axes[key] = [entry for entry in axes[key] if entry in value]
        elif key != "collectives":
            fixed[key] = value
    for point in itertools.product(*axes.values()):
        values = dict(base)
        for new in (dict(zip(axes, point, strict=True)), fixed, changes):
            override(values, new)
        yield Cell(values, bool(grid.get("within_cores", False)))


def simulated_for(made: Strategy, sim: Mapping[str, str]) -> dict[str, str]:
    """The simulator's options for a strategy: who is alone has no slower worker."""
    return {key: value for key, value in sim.items() if made.most_workers > 1 or key != "stragglers"}


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{key}={entry}" for key, entry in value.items())
    return ", ".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
