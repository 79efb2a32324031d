"""What a run of plain SGD loads: nothing that it does not need, since its start is made of that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from covering import first

NEVER = {"torch._dynamo", "torch._inductor", "sympy", "sklearn", "pandas", "plotly", "tensorboard"}
FROM_OTHERS = {"numba", "mpi4py.MPI"}
"""Only ranks speak to each other."""

TASK = f"""
import sys
from pathlib import Path
import hocket, torch
from torch import nn

def note(progress):
    (Path(__file__).parent / f"worker-{{progress.worker}}").write_text(" ".join({NEVER} & set(sys.modules)))

x = torch.randn(64, 4)
data = x, (x.sum(1) > 0).long()
task = hocket.Task(model=lambda: nn.Linear(4, 2), data=(data, data), on_epoch=note, epochs=1)
"""

COMMAND = f"""
import sys
from hocket.app.cli import run
assert run(sys.argv[1:]) == 0
print(*({NEVER | FROM_OTHERS} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("engine", "strategy"), first(1, [("mpi", "allreduce"), ("torch", "allreduce"), ("mpi", "server:mode=async")])
)
def test_a_run_loads_what_it_needs(tmp_path: Path, engine: str, strategy: str) -> None:
    (tmp_path / "told.py").write_text(TASK)
    words = ["train", f"{tmp_path / 'told.py'}:task", "-n", "2", "--engine", engine, "-s", strategy]
    options = ["--momentum", "0.9", "--out", str(tmp_path / "run")]
    argv = [sys.executable, "-c", COMMAND, *words, *options]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ""
    assert [(tmp_path / f"worker-{worker}").read_text() for worker in range(2)] == ["", ""]
