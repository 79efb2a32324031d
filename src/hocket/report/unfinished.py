"""Runs that are still going on: their learning curves so far."""

from __future__ import annotations

import csv
import tomllib
from pathlib import Path
from typing import Any

from hocket.core.errors import UserError
from hocket.report import form
from hocket.report.records import GOING, Record
from hocket.run.choice import engine_class


def unfinished(path: Path) -> list[Record]:
    """Run folders with a curve and no result yet."""
    found = []
    for curve in sorted([path / "curve.csv", *path.glob("*/curve.csv"), *path.glob("*/*/curve.csv")]):
        folder = curve.parent
        if curve.is_file() and not (folder / "result.json").exists() and (folder / "spec.toml").is_file():
            try:
                found.append(_read(folder))
            except (OSError, ValueError, UserError):
                continue  # it is being written, or no run of this version
    return [record for record in found if record["curve"]]


def _read(folder: Path) -> Record:
    spec: dict[str, Any] = tomllib.loads((folder / "spec.toml").read_text())
    with (folder / "curve.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    points = [{key: float(value) if value else None for key, value in row.items()} for row in rows]
    names = (
        [key.removeprefix("test_") for key in points[-1] if key.startswith("test_") and key != "test_loss"]
        if points
        else []
    )
    virtual = "engine" in spec and engine_class(spec["engine"]).virtual_time
    result = {
        "task": Path(str(spec.get("task", folder.name))).name,
        "strategy": spec.get("strategy", "own loop"),
        "workers": spec.get("workers"),
        "engine": spec.get("engine", ""),
        "driver": spec.get("driver"),
        "verdict": GOING,
        "metric": names[0] if names else "metric",
        "curve": points,
        "per_worker": [],
        "target": spec.get("target"),
        "virtual_seconds": 0.0 if virtual else None,
    }
    form.check(result | {"verdict": "finished"})
    return Record(folder, result, spec)
