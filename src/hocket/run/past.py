"""What a run has left behind for going on with it."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from hocket.core.errors import UserError


def newest(folder: Path) -> Path | None:
    """The last checkpoint in a run's folder."""
    return max((folder / "checkpoints").glob("step-*.safetensors"), default=None)


def checkpoint_name(step: int) -> str:
    """What a checkpoint is called that was taken after so many steps; names sort as steps do."""
    return f"step-{step:010d}.safetensors"


def step_of(checkpoint: Path) -> int:
    number = checkpoint.stem.removeprefix("step-")
    if not number.isdecimal():
        raise UserError(f"{checkpoint} is no checkpoint of Hocket's; they are called like step-0000000100.safetensors")
    return int(number)


def read_curve(folder: Path, step: int) -> list[dict[str, Any]]:
    """The points of the learning curve up to a step; what comes after it will come again."""
    return [
        {key: int(value) if key == "step" else float(value) if value else None for key, value in row.items()}
        for row in _rows(folder, step)
    ]


def _rows(folder: Path, step: int) -> list[dict[str, str]]:
    """Whole lines only: the last may have been cut off."""
    try:
        with (folder / "curve.csv").open(newline="") as file:
            return [row for row in csv.DictReader(file) if None not in row.values() and int(row["step"]) <= step]
    except (OSError, ValueError, KeyError, csv.Error):
        return []
