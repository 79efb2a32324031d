"""For tests of what users do wrong: a folder of its own, where what is refused leaves nothing behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hocket.app import cli

TASKS = """
import torch, hocket
data = torch.zeros(64, 2), torch.zeros(64, dtype=torch.long)
def broken(*_):
    return {}["missing"]
def task(**parts):
    return hocket.Task(**{"model": lambda: torch.nn.Linear(2, 2), "data": (data, data), "batch": 4} | parts)
class Broken(torch.nn.Linear):
    forward = broken
model, samples, loss, metric = task(model=broken), task(data=broken), task(loss=broken), task(metric=broken)
forward = task(model=lambda: Broken(2, 2))
"""
"""Parts of tasks that raise, in a file of the user's."""


def enter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go there for the time of a test."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    # What is wrongly accepted runs here, in threads, and starts no processes.
    monkeypatch.setattr("hocket.engines.mpi.available", lambda: "not in this test")


def everything() -> set[Path]:
    return set(Path().rglob("*"))


def refusal(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that the command answers."""
    before = everything()
    status = cli.run(args)
    printed = capsys.readouterr()
    assert status == 2, printed.err
    assert printed.out == ""
    assert printed.err.startswith("hocket: ") and printed.err.endswith("\n")
    assert printed.err.count("\n") == 1, printed.err
    assert "Traceback" not in printed.err
    assert everything() == before
    return printed.err
