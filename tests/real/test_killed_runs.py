"""Runs that are killed at any moment go on."""

from __future__ import annotations

import os
import random
import signal
import time
from functools import cache
from pathlib import Path
from typing import Any

import commands
import pytest
import saving
from covering import THOROUGH, first

import hocket
from hocket.drivers import checkpoint

EPOCHS = 16


@cache
def undisturbed(text: str) -> dict[str, list[Any]]:
    """With two workers there is one order to add in, so every engine finds the same model."""
    found = hocket.fit(saving.large, strategy=text, engine="threads", workers=2, seed=5, progress=False)
    return {name: tensor.tolist() for name, tensor in found.state.items()}


def parts(out: Path) -> list[str]:
    """Files that are being written."""
    folder = out / "checkpoints"
    return [name for name in os.listdir(folder) if name.endswith(".part")] if folder.exists() else []


def stopped_inside_a_write(run: commands.Command, out: Path) -> bool:
    """Stop the command while it writes a checkpoint: then there is time to find all of it, and kill it right there."""
    if not parts(out):
        return False
    run.process.send_signal(signal.SIGSTOP)
    if parts(out):
        return True
    run.process.send_signal(signal.SIGCONT)
    return False


def kill(run: commands.Command, out: Path, moment: str, rng: random.Random) -> bool:
    """Kill a run once it is there; False if it has ended before."""
    before = commands.points(out)
    match moment:
        case "anywhere":
            time.sleep(rng.uniform(0, 4))
        case "training":
            run.until(lambda: commands.points(out) > before)
            time.sleep(rng.uniform(0, 0.3))
        case "writing":
            skip = rng.randrange(4)
            run.until(lambda: commands.points(out) > before + skip and stopped_inside_a_write(run, out))
    if run.process.poll() is not None:
        return False
    segments = run.segments()
    if rng.random() < 0.5:  # what is in other sessions must follow
        os.killpg(run.process.pid, signal.SIGKILL)
        assert run.gone() and not [path for path in segments if path.exists()]
    else:
        run.kill()
    run.process.wait()
    return True


def begin(text: str, out: Path) -> commands.Command:
    """With --force, since a run may have been killed before there was anything to go on from."""
    return commands.train("large", text, "mpi", out, "--checkpoint-every", "1", "--force")


def survive(folder: Path, text: str, moments: list[str], seed: int) -> None:
    """Kill a run at each of these moments, and let it finish."""
    rng = random.Random(seed)
    number, inside = 0, 0
    while moments:
        number += 1
        out = folder / str(number)
        run = begin(text, out)
        while moments and kill(run, out, moments[0], rng):
            moments.pop(0)
            inside += bool(parts(out))
            for saved in commands.checkpoints(out):
                assert checkpoint.read(saved).about["strategy"] == text
            run = commands.hocket("resume", out) if (out / "spec.toml").exists() else begin(text, out)
        commands.finish(run)
        assert commands.model(out) == undisturbed(text)
        assert commands.result(out)["verdict"] == "finished"
        assert {path.name for path in out.iterdir()} == {*FILES, "checkpoints"}
        assert [path.suffix for path in (out / "checkpoints").iterdir()] == [".safetensors"] * 2
        assert commands.points(out) == EPOCHS
    print(f"{text}: killed {inside} times inside a write")
    assert inside


FILES = {"spec.toml", "events.jsonl", "curve.csv", "model.safetensors", "best.safetensors", "result.json"}
MOMENTS = ["writing", "anywhere", "training"]


@pytest.mark.parametrize(
    ("text", "moments"), first(1, [("allreduce", MOMENTS), ("server:mode=sync", ["writing", "training"])])
)
def test_a_killed_run_ends_as_if_nothing_had_happened(tmp_path: Path, text: str, moments: list[str]) -> None:
    survive(tmp_path, text, list(moments), seed=1)


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("text", ["allreduce", "server:mode=sync"])
def test_many_kills(tmp_path: Path, text: str) -> None:
    survive(tmp_path, text, MOMENTS * 5, seed=2)


@pytest.mark.parametrize(
    ("engine", "task", "text"),
    [
        ("mpi", "slow", "hogwild"),
        ("threads", "slow", "server:mode=async"),
        pytest.param("threads", "busy", "hogwild", marks=THOROUGH),
        pytest.param("torch", "slow", "server:mode=async", marks=THOROUGH),
    ],
)
def test_no_sample_is_lost_or_trained_on_twice(tmp_path: Path, engine: str, task: str, text: str) -> None:
    """What was trained on after the last checkpoint is trained on again, from where that was."""
    out = tmp_path / "run"
    run = commands.train(task, text, engine, out, "--checkpoint-every", "1")
    assert run.until(lambda: len(commands.checkpoints(out)) == 2)
    run.kill()
    commands.finish(commands.hocket("resume", out))
    assert commands.samples(out) == {"slow": 20 * saving.SAMPLES, "busy": 60 * 20_000}[task]
