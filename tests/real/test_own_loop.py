"""The user's own loop in real processes: saved and taken up, and with servers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import own_joined
import own_saved
import pytest
from covering import first

HERE, BIN = Path(__file__).parent, Path(sys.executable).parent


def run(*command: str | Path) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr


def launch(engine: str, script: str, *args: str | Path) -> None:
    run(sys.executable, "-m", "hocket", "launch", "--engine", engine, "-n", "3", HERE / script, *args)


@pytest.mark.parametrize("engine", first(1, ["mpi", "threads"]))
def test_a_loop_that_was_saved_goes_on_in_a_new_process(tmp_path: Path, engine: str) -> None:
    for part in ("begin", "rest"):
        launch(engine, "own_saved.py", tmp_path, part)
    for number, text in enumerate(own_saved.TEXTS):
        whole, rest = (json.loads((tmp_path / f"{number}.{mode}").read_text()) for mode in ("whole", "rest"))
        assert whole == rest, text


STARTERS = {
    "mpiexec": [BIN / "mpiexec", "-n", "3", sys.executable],
    "torchrun": [BIN / "torchrun", "--nproc-per-node", "3"],
}


@pytest.mark.parametrize("starter", first(1, ["torchrun", "mpi", "threads", "mpiexec", "torch"]))
def test_a_loop_with_servers(tmp_path: Path, starter: str) -> None:
    """The rates of the user's scheduler reach the server."""
    out = tmp_path / "weights"
    if starter in STARTERS:
        run(*STARTERS[starter], HERE / "own_joined.py", out)
    else:
        launch(starter, "own_joined.py", out)
    found = json.loads(out.read_text())
    _, alone = own_joined.train("allreduce", 8)
    assert found["server:mode=sync"] == pytest.approx(alone, rel=1e-4, abs=1e-6)
    before = own_joined.linear().weight.flatten().tolist()
    rates = sum(own_joined.RATE * 0.25**epoch for epoch in range(own_joined.EPOCHS)) * 6
    """Of one worker, whose epochs have 6 steps."""
    assert found["server:mode=async,stale=none,lookahead=0"] == pytest.approx([x - 2 * rates for x in before], abs=1e-5)
    moved = [x - y for x, y in zip(before, found["elastic:every=2"], strict=True)]
    assert all(0.1 * rates < distance < 1.01 * rates for distance in moved)
