"""Run folders as a run would have left them, without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hocket.run.spec import RunSpec


def leave_run(
    folder: Path,
    strategy: str = "serial",
    workers: int = 1,
    seed: int = 0,
    *,
    time: float | None = 1.0,
    virtual: bool = False,
    speed: float | None = 1000.0,
    accuracy: float | None = 0.9,
    verdict: str = "finished",
    task: str = "digits",
    lower_is_better: bool = False,
    **spec: Any,
) -> Path:
    """A run that took `time` to its target of 0.8; None is never."""
    folder.mkdir(parents=True)
    engine = "sim" if virtual else "threads"
    curve = [
        {"epoch": n, "samples": 100 * n, "seconds": n, "train_loss": 1 / n, "test_accuracy": 0.3 * n, "test_loss": 1.0}
        for n in (1, 2, 3)
    ]
    worker = dict(
        seconds=3.0,
        computing=2.0,
        sending=0.0,
        transferring=0.5,
        waiting=0.5,
        locks=0.0,
        communicating=0.6,
        exposed=0.5,
    )
    result = dict(
        task=task, strategy=strategy, engine=engine, driver="pytorch", workers=workers, seed=seed, verdict=verdict,
        seconds=3.0, virtual_seconds=3.0 if virtual else None, samples_per_s=speed, steps=30, epochs=3.0,
        train_loss=0.3, test_loss=1.0, metric="accuracy", test_accuracy=accuracy, target=0.8, time_to_target=time,
        bytes_sent=1000 * workers, staleness={"mean": 1.5, "max": 2, "histogram": {"1": 5, "2": 5}},
        per_worker=[worker] * workers, consensus_distance=None, curve=curve, parameters=10, versions={}, learnt=True,
        time_to_loss={"50": 2.0}, looks_at="test", lower_is_better=lower_is_better,
    )  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result))
    asked = RunSpec.from_mapping(dict(task="digits", strategy=strategy, workers=workers, seed=seed, **spec))
    (folder / "spec.toml").write_text(asked.to_toml())
    return folder
