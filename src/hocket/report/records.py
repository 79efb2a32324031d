"""Run folders, read back: results grouped by what was run, whatever the seed."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hocket.core.errors import UserError
from hocket.measure.result import Result
from hocket.report import form
from hocket.run.spec import RunSpec, read_toml, settings
from hocket.run.train import brief

GOING = "going on"
"""The verdict on a run that is under way."""
_RESULT, _SPEC = "result.json", "spec.toml"
_DEEPEST = 4
"""Folders below the one that was named: a study has its runs two down."""
_NOT_THE_SAME = {"seed", "trace", "deadline", "checkpoint_every", "mpiexec"}
"""Settings that runs of one group may differ in."""
_THREADS = re.compile(r"[:,]threads=(\d+)")
"""Of a strategy: how many work inside each of its operations."""


@dataclass(frozen=True)
class Record:
    """One run folder."""

    path: Path
    result: dict[str, Any]
    spec: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.result.get(name)

    def setting(self, name: str) -> Any:
        return self.spec.get(name)

    @property
    def simulated(self) -> bool:
        return self["virtual_seconds"] is not None

    @property
    def seconds(self) -> float | None:
        found: float | None = self["virtual_seconds"] if self.simulated else self["seconds"]
        return found

    @property
    def failed(self) -> bool:
        return self["verdict"] in ("diverged", "crashed", "interrupted")

    @property
    def going(self) -> bool:
        """Whether it is not over: then it is shown by itself, and nothing is said of where it gets to."""
        return bool(self["verdict"] == GOING)

    @property
    def metric(self) -> float | None:
        found: float | None = self[f"test_{self['metric']}"]
        return found

    @property
    def cores(self) -> int | None:
        """What its workers compute on, if each has its own."""
        inside, workers = _THREADS.search(str(self["strategy"])), self["workers"]
        return workers * int(inside[1] if inside else 1) if isinstance(workers, int) else None

    @property
    def best(self) -> Callable[..., Any]:
        """Of several values of the metric the best: `min` or `max`."""
        return min if self["lower_is_better"] else max

    def key(self) -> tuple[Any, ...]:
        """The same for runs that differ in their seeds alone."""
        settings = {name: value for name, value in self.spec.items() if name not in _NOT_THE_SAME}
        known = [self["task"], self["strategy"], self["workers"], self["engine"], self["driver"]]
        return (*known, self.going, json.dumps(settings, sort_keys=True, default=str))


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seeds alone, under a name that tells them from the other groups."""

    name: str
    records: list[Record]

    @property
    def first(self) -> Record:
        return self.records[0]

    @property
    def good(self) -> list[Record]:
        return [record for record in self.records if not record.failed]

    @property
    def times(self) -> list[float]:
        """To the target; infinite where a run never got there."""
        return [math.inf if r["time_to_target"] is None else float(r["time_to_target"]) for r in self.records]

    @property
    def reached(self) -> int:
        return sum(map(math.isfinite, self.times))

    def values(self, name: str) -> list[float]:
        found = [r.metric if name == "metric" else r.seconds if name == "seconds" else r[name] for r in self.good]
        return [float(value) for value in found if value is not None]

    def median(self, name: str) -> float | None:
        found = self.values(name)
        return statistics.median(found) if found else None


def record_of(result: Result, number: int | None = None) -> Record:
    """A result that is still in memory; with a number it is a group of its own."""
    return _record(Path(result.out or ""), result.to_json(), {} if number is None else {"run": number})


def read_records(paths: Iterable[Path]) -> tuple[list[Record], list[str]]:
    """Every run below these folders, and a line on each that could not be read."""
    records, problems = [], []
    for path in paths:
        if not path.exists():
            raise UserError(f"there is no folder {path}")
        found = [path] if (path / _RESULT).is_file() else list(_below(path, _DEEPEST))
        if not found:
            raise UserError(f"there is no run in {path}: a run's folder has a {_RESULT}")
        for folder in found:
            try:
                records.append(_read(folder))
            except (OSError, ValueError, KeyError, TypeError, UserError) as error:
                problems.append(f"{folder} cannot be read, and is left out: {_why(error)}")
    if not records:
        raise UserError(f"none of the runs can be read: {problems[0]}")
    return records, problems


def _below(path: Path, depth: int) -> Iterable[Path]:
    for child in sorted(path.iterdir()) if path.is_dir() else ():
        if child.is_dir() and not child.name.startswith("."):
            if (child / _RESULT).is_file():
                yield child
            elif depth:
                yield from _below(child, depth - 1)


def _read(folder: Path) -> Record:
    try:
        result = json.loads((folder / _RESULT).read_bytes(), parse_constant=lambda _: None)  # NaN cannot be drawn
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its {_RESULT} is damaged: {error}") from None
    if not isinstance(result, dict):
        raise ValueError(f"its {_RESULT} is not a table")
    spec = read_toml(folder / _SPEC) if (folder / _SPEC).is_file() else {}
    known = {name: value for name, value in spec.items() if name in settings()}
    RunSpec.from_mapping({"task": result["task"], **known}, _SPEC)  # refuses values of another kind
    form.check(result)
    return _record(folder, result, spec)


def _record(folder: Path, result: dict[str, Any], spec: dict[str, Any]) -> Record:
    for name in ("curve", "per_worker"):
        result[name] = result.get(name) or []
    result["task"] = Path(result["task"]).name
    return Record(folder, {"metric": "metric", "strategy": "own loop", "workers": result.get("ranks")} | result, spec)


def _why(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"its {_RESULT} has no {error}; was it written by another version?"
    return " ".join(str(error).split())


def grouped(records: Sequence[Record]) -> list[Group]:
    """Groups in the order of their first runs, named by what tells them apart."""
    by_key: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        by_key.setdefault(record.key(), []).append(record)
    groups = list(by_key.values())
    naming = Naming.of([group[0] for group in groups])
    return [Group(naming.name(group[0]), group) for group in groups]


def comparable(records: Sequence[Record]) -> Iterator[tuple[str, str, list[Group]]]:
    """Task, kind of time and groups of runs that may be shown together: of one task, and of one kind of time."""
    for task in dict.fromkeys(record["task"] for record in records):
        for simulated, clock in ((False, "time"), (True, "virtual time")):
            chosen = [r for r in records if r["task"] == task and r.simulated == simulated]
            if chosen:
                yield task, clock, grouped(chosen)


def by_target(groups: Sequence[Group]) -> dict[float, list[Group]]:
    """Groups with a target, by what it is: times to different ones are never compared."""
    found: dict[float, list[Group]] = defaultdict(list)
    for group in groups:
        if group.first["target"] is not None and not group.first.going:
            found[group.first["target"]].append(group)
    return found


@dataclass(frozen=True)
class Naming:
    """What tells groups apart: settings, and where they differ or nothing else does, strategy and workers."""

    settings: list[str]
    """As in a record's `spec`, but for tables: of these each entry, such as `sim.compute`."""
    strategy: bool
    workers: bool
    usual: Mapping[str, Any]
    """What most groups have in common, of these settings: a name says only what is else."""

    @classmethod
    def of(cls, firsts: Sequence[Record]) -> Naming:
        flat = [_flat(record.spec) for record in firsts]
        elsewhere = {"task", "strategy", "workers", "driver", *_NOT_THE_SAME}
        names = [name for name in dict.fromkeys(name for one in flat for name in one) if name not in elsewhere]
        found = [name for name in names if len({json.dumps(one.get(name), default=str) for one in flat}) > 1]
        strategies, counts = ({r[name] for r in firsts} for name in ("strategy", "workers"))
        differ = len(strategies) > 1
        usual = {name: value for name in found if (value := _of_most([one.get(name) for one in flat])) is not None}
        naming = cls(found, differ or not found, len(counts) > 1 or not (found or differ), usual)
        alike = len({naming.name(record) for record in firsts}) < len(firsts)
        return dataclasses.replace(naming, settings=[*found, "driver"]) if alike else naming

    def name(self, record: Record, without: Collection[str] = ()) -> str:
        """Of its group; `without` settings that a figure shows by its place."""
        strategy = brief(str(record["strategy"]))
        if "cores" in without:
            strategy = _THREADS.sub("", strategy)
        words = [strategy] if self.strategy else []
        flat = _flat(record.spec) | {"driver": record["driver"]}
        for name in self.settings:
            table, _, entry = name.rpartition(".")
            if flat.get(name) not in (None, self.usual.get(name)) and not {name, table} & set(without):
                words.append(_engine(flat[name]) if name == "engine" else f"{entry}={flat[name]}")
        if self.workers and not {"workers", "cores"} & set(without):
            words.append(f"× {record['workers']}")
        if record.going:
            words.append(f"({GOING})")
        return " ".join(words) or brief(str(record["strategy"]))


def _of_most(values: Sequence[Any]) -> Any:
    """What more than half of them are; None if there is no such value, or if one is not known."""
    texts = [json.dumps(value, default=str) for value in values]
    text, count = Counter(texts).most_common(1)[0]
    return values[texts.index(text)] if 2 * count > len(values) and None not in values else None


def _flat(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of tables beside the other settings."""
    tables = {name: value for name, value in spec.items() if isinstance(value, dict)}
    inside = {f"{name}.{key}": value for name, table in tables.items() for key, value in table.items()}
    return {name: value for name, value in spec.items() if name not in tables} | inside


def told(values: Mapping[str, Any]) -> str:
    """Settings in a line."""
    return " ".join(f"{name.rpartition('.')[2]}={value}" for name, value in values.items())


def _engine(text: str) -> str:
    """Its options if it has some: the table beside a figure has its name."""
    name, _, options = text.partition(":")
    return options or name
