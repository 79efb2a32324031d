"""Split models on ranks that are processes: communication inside backward included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hocket

TASK = f"{Path(__file__).parent / 'own_split.py'}:task"


@pytest.mark.parametrize("name", ["mpi", "torch"])
@pytest.mark.parametrize("layout", ["tensor=2", "pipeline=2,microbatches=4", "domain=2", "tensor=2,data=2"])
def test_a_split_model_learns_on_every_engine_as_one_process_does(name: str, layout: str) -> None:
    common: dict[str, Any] = {"steps": 12, "progress": False}
    alone = hocket.fit(TASK, workers=2 if "data" in layout else 1, engine="threads", **common)
    found = hocket.fit(TASK, layout=layout, engine=name, **common)
    assert found.state.keys() == alone.state.keys()
    for key, tensor in found.state.items():
        assert torch.allclose(tensor, alone.state[key], rtol=1e-9, atol=1e-12)
