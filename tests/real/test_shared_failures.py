"""A run in shared memory whose worker is killed, or that the user interrupts, ends at once, with a verdict."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from covering import first
from leftovers import segments, vanish
from test_failures import children

import hocket

MORTAL = '''
import os, signal, torch, hocket

class Mortal(torch.nn.Module):
    """Kills the process of rank 1 at its 20th training step."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.steps = 0

    def forward(self, x):
        self.steps += self.training
        if self.steps == 20 and os.environ.get("PMI_RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(x)

data = torch.randn(64, 4), torch.zeros(64, dtype=torch.long)
task = hocket.Task(model=Mortal, data=(data, data), batch=4, epochs=1000000)
'''

LONG = """
import torch, hocket

# One epoch of these, sample by sample, takes minutes.
data = torch.zeros(3000000, 8), torch.zeros(3000000, dtype=torch.long)
test = data[0][:64], data[1][:64]
model = lambda: torch.nn.Sequential(torch.nn.Linear(8, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64))
task = hocket.Task(model=model, data=(data, test), batch=1, epochs=100)
"""


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    before, segments_before = children(), segments()
    yield
    limit = time.monotonic() + 20
    while (left := children() - before) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not left, f"processes left behind: {left}"
    assert vanish(segments() - segments_before), "in /dev/shm"


@pytest.mark.parametrize("method", first(2, ["rwlock", "hogwild", "leashed", "mutex"]))
def test_a_worker_that_is_killed_ends_the_run(method: str, tmp_path: Path) -> None:
    file = tmp_path / "mortal.py"
    file.write_text(MORTAL)
    with pytest.raises(hocket.RankFailed, match="died") as caught:
        hocket.fit(
            f"{file}:task", strategy=method, engine="mpi", workers=2, out=tmp_path / "run", progress=False, deadline=30
        )
    assert caught.value.rank == 1
    record = json.loads((tmp_path / "run/result.json").read_text())
    assert record["verdict"] == "crashed"
    assert "rank 1" in record["error"] and "died" in record["error"]


def interrupted(
    folder: Path, *args: str, until: Callable[[], bool], after: float = 0.0
) -> tuple[float, dict[str, Any]]:
    """Start a run, interrupt it once `until` holds and some time after; the seconds that it took to end."""
    command = [sys.executable, "-m", "hocket", "train", *args, "--engine", "threads", "--out", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder.parent)
    try:
        limit = time.monotonic() + 90
        while not until():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < limit, "it never began"
            time.sleep(0.02)
        time.sleep(after)
        assert process.poll() is None, process.communicate()
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        took = time.monotonic() - sent
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert process.returncode == 130, said
    assert said.rstrip().endswith("hocket: interrupted"), said
    assert "Traceback" not in said
    return took, json.loads((folder / "result.json").read_text())


def test_ctrl_c_ends_compiled_workers_between_epochs(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    curve = folder / "curve.csv"
    took, record = interrupted(
        folder, "digits", "--strategy", "leashed", "--epochs", "1000000",
        until=lambda: curve.exists() and curve.stat().st_size > 200,
    )  # fmt: skip
    assert took < 30
    assert record["verdict"] == "interrupted"
    assert record["steps"] > 0 and len(record["curve"]) > 0


@pytest.mark.parametrize("workers", first(1, [12, 2]))
def test_ctrl_c_ends_compiled_workers_inside_a_long_epoch(tmp_path: Path, workers: int) -> None:
    """They run no Python for minutes, and there may be more of them than could be waited for one by one."""
    file, folder = tmp_path / "long.py", tmp_path / "run"
    file.write_text(LONG)
    took, record = interrupted(
        folder, f"{file}:task", "--strategy", "hogwild", "--workers", str(workers),
        after=6.0, until=(folder / "spec.toml").exists,
    )  # fmt: skip
    assert took < 30
    assert record["verdict"] == "interrupted" and record["steps"] > 0, "what was done until then counts"
