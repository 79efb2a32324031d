"""A study that is killed at any moment goes on, and ends with the table of one that was not disturbed."""

from __future__ import annotations

import csv
import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import commands
import pytest

STUDY = """
seeds = 2
[settings]
task = "digits"
engine = "sim"
epochs = 15
[[grid]]
strategy = "serial"
workers = 1
[[grid]]
strategy = ["allreduce", "server:mode=async", "gossip"]
workers = [1, 2, 3]
"""
RUNS = 2 * (1 + 3 + 3 + 2)
"""All but those of gossip with one worker."""
MOMENTS = ["inside", "between", "inside", "at once"]


def begin(folder: Path, out: Path) -> commands.Command:
    return commands.hocket("study", folder / "study.toml", "--out", out)


def table(out: Path) -> list[dict[str, str]]:
    """Without real times: virtual ones are the same in every run."""
    with (out / "table.csv").open(newline="") as file:
        return [{key: value for key, value in row.items() if key != "seconds"} for row in csv.DictReader(file)]


def results(out: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in out.glob("runs/*/result.json")}


def more_results(out: Path, than: int) -> bool:
    return len(results(out)) > than


def under_way(out: Path) -> bool:
    return any(not (path.parent / "result.json").exists() for path in out.glob("runs/*/spec.toml"))


def survive(folder: Path, kills: int, seed: int) -> None:
    (folder / "study.toml").write_text(STUDY)
    commands.finish(begin(folder, folder / "whole"))
    out, rng, killed, inside = folder / "killed", random.Random(seed), 0, 0
    while killed < kills:
        before = results(out)
        study = begin(folder, out)
        # Most of a start is spent on imports: wait for something, then strike anywhere; now and then at once
        match MOMENTS[killed % len(MOMENTS)]:
            case "between":
                study.until(partial(more_results, out, len(before) + rng.randrange(2)))
            case "inside":
                study.until(partial(more_results, out, len(before)))
                study.until(partial(under_way, out))
        time.sleep(rng.uniform(0, 0.1))
        if study.process.poll() is not None:  # it has ended: begin another one
            commands.finish(study)
            assert table(out) == table(folder / "whole")
            out = folder / f"killed-{killed}"
            continue
        if rng.random() < 0.5:
            os.killpg(study.process.pid, signal.SIGKILL)
        study.kill()
        killed += 1
        inside += under_way(out)
        now = results(out)
        assert before.items() <= now.items()  # no finished run is lost or repeated
    commands.finish(begin(folder, out))
    assert len(table(out)) == RUNS
    assert table(out) == table(folder / "whole")
    print(f"{inside} of {kills} kills were inside a run")
    assert inside


@pytest.mark.timeout(600)
def test_a_killed_study_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    survive(tmp_path, 3, seed=1)


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_twenty_kills(tmp_path: Path) -> None:
    survive(tmp_path, 20, seed=2)
