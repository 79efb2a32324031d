"""The example of a task in a package, as its README runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples/own_task_package"


def run(*args: str) -> str:
    done = subprocess.run([sys.executable, *args], cwd=FOLDER, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("engine", "strategy"),
    [("threads", "spirals.strategy:warm-start"), ("mpi", "spirals/strategy.py:warm-start:steps=50")],
)
def test_trains_by_name(engine: str, strategy: str, tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    train = ["-m", "hocket", "train", "spirals.train:task", "--workers", "2", "--out", out]
    found = json.loads(run(*train, "--engine", engine, "--strategy", strategy, "--json"))
    assert found["verdict"] == "finished" and found["looks_at"] == "validation"
    assert found["test_accuracy"] > 0.85 and found["test_top2"] >= found["test_accuracy"]
    assert (tmp_path / "run/best.safetensors").is_file()


def test_runs_as_a_module() -> None:
    lines = run("-m", "spirals.train").splitlines()
    assert float(lines[-1].split()[2].rstrip(",")) > 0.85
