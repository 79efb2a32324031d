"""The shared vector in processes that count, and in processes that are killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CANARY = Path(__file__).parents[1] / "canary.py"


def run(*arguments: str) -> Any:
    done = subprocess.run([sys.executable, CANARY, *arguments], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("method", ["mutex", "rwlock", "leashed"])
def test_four_processes_tear_and_lose_nothing(method: str) -> None:
    seen = run("count", method)
    assert seen["torn"] == 0
    assert seen["lowest"] == seen["highest"] == seen["version"] == seen["updates"] == 100_000
    assert not any(seen["references"])
    assert seen["peak"] <= 3 * 4 + 1
    assert not seen["left"]


@pytest.mark.parametrize("method", ["mutex", "hogwild", "leashed"])
def test_the_others_go_on_after_many_kills(method: str, thorough: bool) -> None:
    kills = 50 if thorough else 10
    seen = run("kill", method, str(kills))
    assert seen["kills"] >= kills
    assert seen["went_on"] == seen["crews"]
    assert seen["hung"] == seen["broke"] == seen["left"] == 0
    if method != "hogwild":
        assert seen["hits"] > 0  # a lock or a slot was held at least once
    if method == "leashed":
        assert seen["torn"] == 0  # the dead leave only what they had not published


def test_a_rwlock_that_died_with_its_holder_ends_the_run_at_the_deadline(thorough: bool) -> None:
    kills = 50 if thorough else 10
    seen = run("kill", "rwlock", str(kills))
    assert seen["kills"] >= kills
    assert seen["broke"] > 0
    assert seen["went_on"] + seen["broke"] >= seen["crews"]
    assert seen["hung"] == seen["torn"] == seen["left"] == 0
