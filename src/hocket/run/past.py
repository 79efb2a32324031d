"""What a run has left behind for going on with it."""

from __future__ import annotations

import csv
import os
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


def cut_curve(folder: Path, step: int) -> None:
    """Take what comes after a step off curve.csv, in one piece."""
    rows = _rows(folder, step)
    part = folder / ".curve.csv.part"
    with part.open("w", newline="") as file:
        if rows:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    os.replace(part, folder / "curve.csv")


def _rows(folder: Path, step: int) -> list[dict[str, str]]:
    """Whole lines only: the last may have been cut off."""
    try:
        with (folder / "curve.csv").open(newline="") as file:
            return [row for row in csv.DictReader(file) if None not in row.values() and int(row["step"]) <= step]
    except (OSError, ValueError, KeyError, csv.Error):
        return []
