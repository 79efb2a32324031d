"""Going on with a run from its newest checkpoint."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hocket.core.errors import UserError
from hocket.drivers.checkpoint import Damaged, epochs_done, read
from hocket.measure.result import Result
from hocket.run.loading import absolute
from hocket.run.past import by_age
from hocket.run.progress import Display
from hocket.run.spec import RunSpec, override, read_toml, settings
from hocket.run.train import Training, prepare
from hocket.strategies import strategy
from hocket.tasks import Task


def resume(folder: Path, changes: Mapping[str, Any], display: Display, task: Task | None = None) -> Result:
    """Run on in the same folder, with some settings changed."""
    asked_s = time.monotonic()
    if not os.path.isfile(folder / "spec.toml"):
        raise UserError(f"{folder} is no run's folder: it has no spec.toml; give the folder that 'hocket train' made")
    values = read_toml(folder / "spec.toml")
    if "task" not in values:
        if task is None:
            raise UserError(f"the task of {folder} has no name; give it: hocket.resume({str(folder)!r}, task=...)")
        values["task"] = ""
    before = RunSpec.from_mapping(values, str(folder / "spec.toml"))
    override(values, dict(changes))
    after = RunSpec.from_mapping(values)
    _check_changes(before, after)
    checkpoint = _newest(folder)
    if not checkpoint and not before.checkpoint_every:
        raise UserError(f"{folder} has no checkpoint to go on from; train anew, with --checkpoint-every 1")
    training = prepare(after, task, resume=str(checkpoint.resolve()) if checkpoint else "")
    _check_unfinished(folder, before, training)
    if not checkpoint:
        display.note(f"{folder} had not come to its first checkpoint: it starts from the beginning")
        return training.run(folder, force=True, display=display, asked_s=asked_s)
    if (done := epochs_done(checkpoint)) >= training.epochs:
        raise UserError(f"{folder} has done {done:g} of {training.epochs:g} epochs; give it more, such as epochs=N")
    return training.run(folder, display=display, asked_s=asked_s)


def _newest(folder: Path) -> Path | None:
    """The newest checkpoint, if it can be read; whether to go on from the one before it is the user's to say."""
    found, *older = [*by_age(folder), None]
    if found is not None:
        try:
            read(found)
        except Damaged as error:
            remedy = f"; delete it to go on from {older[0].name}" if older and older[0] else "; train anew"
            raise UserError(f"{error}{remedy}") from None
    return found


def _check_changes(before: RunSpec, after: RunSpec) -> None:
    for name, declared in settings().items():
        old, new = getattr(before, name), getattr(after, name)
        if declared.metadata["fixed"] and old != new:
            raise UserError(f"a run is resumed with its own {name} ({old}); train anew for another")
    old, new = (strategy.split(absolute(spec.strategy, strategy))[0] for spec in (before, after))
    if old != new:
        raise UserError(f"a run is resumed with its own strategy ({old}); train anew for another")


def _check_unfinished(folder: Path, before: RunSpec, training: Training) -> None:
    """Refuse a run that has nothing left to do."""
    try:
        result = json.loads((folder / "result.json").read_text())
        verdict, steps, epochs = str(result["verdict"]), int(result["steps"]), float(result["epochs"])
    except (OSError, ValueError, TypeError, KeyError):
        return  # it was cut off before it could say
    after = training.spec
    if verdict == "finished" and epochs >= training.epochs:
        raise UserError(f"{folder} is finished after {steps} steps; give it more, such as epochs=N")
    if verdict == "reached-target" and before.target == after.target:
        raise UserError(f"{folder} has reached its target {after.target:g}; give it another, such as target=none")
    if verdict == "diverged" and dataclasses.replace(before, epochs=None) == dataclasses.replace(after, epochs=None):
        raise UserError(f"{folder} has diverged; change what made it, such as lr=VALUE")
