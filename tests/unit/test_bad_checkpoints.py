"""Checkpoints that a run cannot go on from: one clear line and status 2 each. 8 s."""

from __future__ import annotations

import json
import os
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from hocket.app import cli
from hocket.drivers import checkpoint

TASK = """
import torch, hocket
g = torch.Generator().manual_seed(7)
x = torch.randn(48, 4, generator=g)
y = (x[:, 0] > 0).long()
task = hocket.Task(
    model=lambda: torch.nn.Linear(4, {classes}), data=((x, y), (x, y)), batch=4, epochs=2, lr=0.1, momentum=0.9
)
"""

Captured = pytest.CaptureFixture[str]


class Runs:
    """Runs of one small task in a folder."""

    def __init__(self, folder: Path, capture: Captured) -> None:
        self._file, self._capture = folder / "own.py", capture
        self.folder = folder / "run"
        self._written_s = 1_700_000_000
        self.write_task(classes=2)

    def write_task(self, classes: int) -> None:
        self._file.write_text(TASK.format(classes=classes))
        self._written_s += 1  # as long as before, and within a second: Python would take what it compiled before
        os.utime(self._file, (self._written_s, self._written_s))
        sys.modules.pop("hocket_user_own", None)

    def train(self, *args: str, every: int = 1) -> Path:
        """Two epochs; returns the last checkpoint."""
        where = ["--engine", "threads", "--out", str(self.folder), "--checkpoint-every", str(every)]
        assert cli.run(["train", f"{self._file}:task", *where, *args]) == 0
        self._capture.readouterr()
        return max((self.folder / "checkpoints").iterdir())

    def resume(self, *args: str, status: int = 0) -> str:
        """What it says."""
        assert cli.run(["resume", str(self.folder), *args]) == status
        return self._capture.readouterr().err

    def refused(self, *args: str) -> str:
        """The one line that says why it does not resume; nothing is changed."""
        before = {path: path.read_bytes() for path in self.folder.rglob("*.*")}
        said = self.resume(*args, status=2)
        assert {path: path.read_bytes() for path in self.folder.rglob("*.*")} == before
        lines = [line for line in said.splitlines() if line.startswith("hocket: ")]
        assert len(lines) == 1 and "Traceback" not in said and " go on, " not in said, said
        return lines[0]


@pytest.fixture
def runs(tmp_path: Path, capsys: Captured) -> Runs:
    return Runs(tmp_path, capsys)


def flip(raw: bytearray, at: int) -> None:
    raw[at] ^= 1


def header_length(raw: bytes) -> int:
    return int(struct.unpack("<Q", raw[:8])[0])


def flip_in_a_tensor(raw: bytearray) -> None:
    flip(raw, -9)


def flip_in_the_header(raw: bytearray) -> None:
    """In what the ranks' states say beside their tensors: a number of steps."""
    flip(raw, raw.index(b"judged", 0, header_length(raw) + 8) + 1)


def flip_in_a_number(raw: bytearray) -> None:
    found = re.search(rb'momentum\\", 0\.(9)', raw)
    assert found
    flip(raw, found.start(1))


def flip_in_the_length(raw: bytearray) -> None:
    flip(raw, 1)


def cut(raw: bytearray) -> None:
    del raw[len(raw) * 2 // 3 :]


def cut_in_the_header(raw: bytearray) -> None:
    del raw[100:]


def replace(raw: bytearray) -> None:
    raw[:] = b"not a safetensors file, but some text\n"


@pytest.mark.parametrize(
    "damage",
    [
        flip_in_a_tensor, flip_in_the_header, flip_in_a_number, flip_in_the_length, cut, cut_in_the_header, replace,
        bytearray.clear,
    ],
)  # fmt: skip
def test_a_damaged_file(runs: Runs, damage: Callable[[bytearray], None]) -> None:
    saved = runs.train()
    raw = bytearray(saved.read_bytes())
    damage(raw)
    saved.write_bytes(raw)
    line = runs.refused("epochs=3")
    assert str(saved) in line and "is damaged, or no checkpoint of Hocket's; delete it to go on from step-" in line
    saved.unlink()
    assert runs.resume("epochs=3"), "and the one before it can be taken"


def test_a_safetensors_file_of_something_else(runs: Runs) -> None:
    saved = runs.train()
    saved.write_bytes((runs.folder / "model.safetensors").read_bytes())
    assert f"{saved} is damaged, or no checkpoint of Hocket's" in runs.refused("epochs=3")


def test_a_later_version(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(checkpoint, "FORMAT", 2)
        later.setattr(checkpoint, "__version__", "99.0")
        saved = runs.train()
    line = runs.refused("epochs=3")
    assert f"{saved} was written by Hocket 99.0; this is" in line and "which cannot read it" in line


def test_another_model(runs: Runs) -> None:
    saved = runs.train()
    runs.write_task(classes=3)
    line = runs.refused("epochs=3")
    assert str(saved) in line and "number of parameters is 10, here it is 15" in line


def test_another_strategy(runs: Runs) -> None:
    saved = runs.train("-s", "local-sgd:every=2")
    assert "its own strategy (local-sgd)" in runs.refused("strategy=allreduce", "epochs=3")
    line = runs.refused("strategy=local-sgd:every=3", "epochs=3")
    assert str(saved) in line and "strategy is local-sgd:every=2, here it is local-sgd:every=3" in line


def test_more_workers_can_go_on_where_all_were_alike(runs: Runs) -> None:
    runs.train("-n", "2")
    said = runs.resume("workers=3", "epochs=4")
    assert "step-0000000012.safetensors was saved by 2 workers; 3 go on, all alike" in said
    result = json.loads((runs.folder / "result.json").read_text())
    assert (result["workers"], result["steps"], result["epochs"]) == (3, 16, 4.0)
    assert [worker["samples"] for worker in result["per_worker"]] == [48 + 32, 48 + 32, 32]
    assert [point["epoch"] for point in result["curve"]] == [1.0, 2.0, 3.0, 4.0]


def test_fewer_workers_too(runs: Runs) -> None:
    runs.train("-n", "3")
    assert "was saved by 3 workers; 1 go on" in runs.resume("workers=1", "epochs=3")
    assert load_file(runs.folder / "model.safetensors")["weight"].isfinite().all()


def test_steps_that_go_back_with_more_workers(runs: Runs) -> None:
    """One worker takes 12 steps an epoch, three take 4: what counts is the epoch."""
    runs.train("-n", "1")
    assert "was saved by 1 workers; 3 go on" in runs.resume("workers=3", "epochs=4")
    names = sorted(path.name for path in (runs.folder / "checkpoints").iterdir())
    assert names == ["step-0000000012.safetensors", "step-0000000016.safetensors"]
    assert "was saved by" not in runs.resume("epochs=5")
    result = json.loads((runs.folder / "result.json").read_text())
    points = [(point["step"], point["epoch"]) for point in result["curve"]]
    assert points == [(12, 1), (8, 2), (12, 3), (16, 4), (20, 5)], "the second was looked at again"
    assert sum(worker["samples"] for worker in result["per_worker"]) == 5 * 48
    epochs = [line.split(",")[1] for line in (runs.folder / "curve.csv").read_text().splitlines()[1:]]
    assert epochs == ["1.0", "2.0", "3.0", "4.0", "5.0"]


@pytest.mark.parametrize(
    ("text", "args", "why"),
    [
        ("local-sgd:every=5", ["epochs=3"], "not all in the same state"),
        ("allreduce", ["steps=14"], "not at the end of an epoch"),
        ("server:mode=sync", ["epochs=3"], "not all in the same state"),
    ],
)
def test_other_workers_where_that_is_not_possible(runs: Runs, text: str, args: list[str], why: str) -> None:
    saved = runs.train("-s", text, "--steps", "7" if "steps" in args[0] else "12")
    line = runs.refused("workers=3", *args)
    assert f"{saved} was saved by 2 workers, {why}: it goes on with as many; use 2 workers" in line


def test_a_folder_without_checkpoints(runs: Runs) -> None:
    runs.train(every=1000)
    saved: list[Any] = list((runs.folder / "checkpoints").iterdir())
    assert len(saved) == 1, "the one at the end"
    saved[0].unlink()
    spec = runs.folder / "spec.toml"
    spec.write_text(spec.read_text().replace('checkpoint_every = "1000"\n', ""))
    assert "has no checkpoint to go on from; train anew, with --checkpoint-every 1" in runs.refused()


def test_a_folder_that_is_no_run(runs: Runs, tmp_path: Path) -> None:
    runs.folder.mkdir()
    assert "is no run's folder: it has no spec.toml" in runs.refused()


def test_a_run_that_is_finished(runs: Runs) -> None:
    runs.train()
    assert "is finished after 12 steps; give it more, such as epochs=N" in runs.refused()
