"""What a run has left behind for going on with it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from hocket.drivers.report import ABOUT_BEST
from hocket.measure.folder import BEST


def by_age(folder: Path) -> list[Path]:
    """The checkpoints in a run's folder, the newest first."""
    return sorted((folder / "checkpoints").glob("step-*.safetensors"), reverse=True)


def checkpoint_name(step: int) -> str:
    """What a checkpoint is called that was taken after so many steps; names sort as steps do."""
    return f"step-{step:010d}.safetensors"


def read_curve(folder: Path, epoch: float) -> list[dict[str, Any]]:
    """The points of the learning curve up to an epoch; what comes after it will come again.

    Not up to a step: with other workers an epoch has another number of them.
    """
    return [{key: _number(key, value) for key, value in row.items()} for row in _rows(folder, epoch)]


def read_best(folder: Path) -> dict[str, Any] | None:
    """Step, epoch and metric of the best model that a run had, maybe after the checkpoint that it goes on from."""
    try:
        with safe_open(folder / BEST, "pt") as file:
            found: dict[str, Any] = json.loads((file.metadata() or {})[ABOUT_BEST])
            return found
    except (OSError, SafetensorError, ValueError, KeyError):
        return None


def _number(key: str, value: str) -> float | None:
    if not value:
        return None
    return int(value) if key in ("step", "samples") else float(value)


def _rows(folder: Path, epoch: float) -> list[dict[str, str]]:
    """Whole lines only: the last may have been cut off."""
    try:
        with (folder / "curve.csv").open(newline="") as file:
            return [row for row in csv.DictReader(file) if None not in row.values() and float(row["epoch"]) <= epoch]
    except (OSError, ValueError, KeyError, csv.Error):
        return []
