"""A run that is told to end by a signal saves itself, and goes on later."""

from __future__ import annotations

import signal
from functools import cache
from pathlib import Path
from typing import Any

import commands
import pytest
import saving
from covering import THOROUGH
from test_command import documented_keys

import hocket
from hocket.drivers import checkpoint

SIGNALS = [signal.SIGTERM, signal.SIGHUP, signal.SIGINT]
RUNS = [
    (engine, "slow", text)
    for text in ("allreduce", "server:mode=async")
    for engine in ("threads", "sim", "mpi", "torch")
]
RUNS += [("threads", "busy", "hogwild")]
CHOSEN = [
    ("threads", "allreduce", signal.SIGTERM),
    ("torch", "allreduce", signal.SIGHUP),
    ("sim", "server:mode=async", signal.SIGHUP),
    ("mpi", "server:mode=async", signal.SIGINT),
    ("threads", "hogwild", signal.SIGINT),
]
"""Every engine, strategy and signal."""
EVERY = [
    pytest.param(engine, task, text, number, marks=() if (engine, text, number) in CHOSEN else THOROUGH)
    for engine, task, text in RUNS
    for number in SIGNALS
]


@cache
def undisturbed() -> dict[str, list[Any]]:
    """The model of the run with allreduce. With two workers there is one order to add in, so every engine finds it."""
    found = hocket.fit(saving.slow, strategy="allreduce", engine="threads", workers=2, seed=5, progress=False)
    return {name: tensor.tolist() for name, tensor in found.state.items()}


@pytest.mark.parametrize(("engine", "task", "text", "number"), EVERY)
def test_ended_by_a_signal(tmp_path: Path, engine: str, task: str, text: str, number: signal.Signals) -> None:
    out = tmp_path / "run"
    run = commands.train(task, text, engine, out)
    assert run.until(lambda: commands.points(out) >= 2)
    segments = run.segments()
    run.process.send_signal(number)
    status, said = run.process.wait(60), run.process.stderr.read()
    assert (status, said.splitlines()[-1]) == (128 + number, "hocket: interrupted")
    assert run.gone() and not [path for path in segments if path.exists()]
    found = commands.result(out)
    assert found["verdict"] == "interrupted" and found.keys() >= documented_keys()
    assert 2 <= found["epochs"] < {"slow": 20, "busy": 60}[task]
    assert commands.model(out)
    (saved,) = commands.checkpoints(out)
    assert checkpoint.read(saved).about["step"] == found["steps"] > 0

    commands.finish(commands.hocket("resume", out))
    found = commands.result(out)
    assert found["verdict"] == "finished"
    assert commands.samples(out) == {"slow": 20 * saving.SAMPLES, "busy": 60 * 20_000}[task]
    if text == "allreduce":
        assert commands.model(out) == undisturbed()


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        ("mpi", "allreduce"),
        pytest.param("mpi", "server:mode=async", marks=THOROUGH),
        pytest.param("threads", "allreduce", marks=THOROUGH),
        pytest.param("threads", "server:mode=async", marks=THOROUGH),
    ],
)
def test_checkpoints_by_the_clock(tmp_path: Path, engine: str, text: str) -> None:
    out = tmp_path / "run"
    run = commands.train("slow", text, engine, out, "--checkpoint-every", "0.3s")
    names: set[str] = set()
    run.until(lambda: names.update(path.name for path in commands.checkpoints(out)))
    commands.finish(run)
    assert len(names) >= 3, "some in the middle, and one at the end"
    last = commands.checkpoints(out)[-1]
    assert checkpoint.read(last).about["step"] == commands.result(out)["steps"]
    last.unlink()
    (out / "result.json").unlink()
    commands.finish(commands.hocket("resume", out))
    assert commands.samples(out) == 20 * saving.SAMPLES
    if text == "allreduce":
        assert commands.model(out) == undisturbed()
