"""Split models on ranks that are processes: communication inside backward included."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import first

import hocket
from hocket.engines.catalogue import engine
from hocket.strategies import strategy

TASK = f"{Path(__file__).parent / 'own_split.py'}:task"
SINGLE = f"{Path(__file__).parent / 'own_split.py'}:in_single_precision"
LAYOUTS = ["tensor=2,data=2", "pipeline=2,microbatches=4", "tensor=2", "domain=2"]
CHOSEN = [("mpi", "tensor=2,data=2"), ("torch", "pipeline=2,microbatches=4")]
"""Messages and collectives; on threads, tests/unit has all."""
REST = [case for case in product(["mpi", "torch"], LAYOUTS) if case not in CHOSEN]


@pytest.mark.parametrize(("name", "layout"), first(2, [*CHOSEN, *REST]))
def test_a_split_model_learns_on_every_engine_as_one_process_does(name: str, layout: str) -> None:
    common: dict[str, Any] = {"steps": 12, "progress": False}
    alone = hocket.fit(TASK, workers=2 if "data" in layout else 1, engine="threads", **common)
    found = hocket.fit(TASK, layout=layout, engine=name, **common)
    assert found.state.keys() == alone.state.keys()
    for key, tensor in found.state.items():
        assert torch.allclose(tensor, alone.state[key], rtol=1e-9, atol=1e-12)


APART = ["server:mode=async", "hogwild", "elastic:every=2", "leashed", "server:servers=2", "gossip:kind=pull"]
CHOSEN_APART = [("torch", "server:mode=async", LAYOUTS[1]), ("mpi", "hogwild", "tensor=2")]
REST_APART = [
    (name, text, layout)
    for name, text, layout in product(["mpi", "torch"], APART, ["tensor=2", LAYOUTS[1], "domain=2"])
    if (name, text, layout) not in CHOSEN_APART and strategy.make(text).needs <= engine[name].offers
]


@pytest.mark.parametrize(("name", "text", "layout"), first(2, [*CHOSEN_APART, *REST_APART]))
def test_parts_that_go_their_own_ways_learn_and_go_on(
    tmp_path: Path, thorough: bool, name: str, text: str, layout: str
) -> None:
    settings: dict[str, Any] = {"layout": f"{layout},data=2", "engine": name, "strategy": text, "progress": False}
    found = hocket.fit(SINGLE, out=tmp_path / "run", checkpoint_every=1, epochs=3, **settings)
    assert found.learnt and found.epochs == 3
    if thorough:
        assert hocket.resume(tmp_path / "run", epochs=4, progress=False).epochs == 4


def test_pytorchs_own_parallelism_learns_the_same(tmp_path: Path) -> None:
    """DTensor's column- and row-wise layers, and the 1F1B schedule of torch.distributed.pipelining."""
    script = Path(__file__).parent / "own_torch_parallel.py"
    command = [sys.executable, "-m", "hocket", "launch", "-n", "2", "--engine", "torch", "--out", str(tmp_path / "run")]
    found = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stderr
    assert "dtensor: the same" in found.stdout and "schedule: the same" in found.stdout
