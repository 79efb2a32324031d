"""What the README says of GPUs: every strategy on every engine, servers included. Runs where there is one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hocket
from hocket.engines.catalogue import engine
from hocket.strategies import strategy

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here"),
]

TEXTS = sorted({
    *strategy, "allreduce:algorithm=ring", "gossip:kind=adpsgd", "gossip:kind=sgp", "server:mode=async",
    "server:mode=async,servers=2,stale=none", "server:mode=ssp", "elastic:stale=gap", "diloco:every=4",
})  # fmt: skip


def fit(text: str, name: str, device: str, **settings: Any) -> hocket.Result:
    chosen = strategy.make(text)
    workers = min(max(2, chosen.fewest_workers), chosen.most_workers)
    defaults = {"epochs": 2, "deadline": 120.0, "seed": 1}
    return hocket.fit(
        "digits", strategy=text, workers=workers, engine=name, device=device, progress=False, **defaults | settings
    )


@pytest.mark.parametrize("name", list(engine))
@pytest.mark.parametrize("text", TEXTS)
def test_a_strategy_on_a_gpu_learns_what_it_learns_without(text: str, name: str) -> None:
    chosen = strategy.make(text)
    if chosen.needs - engine[name].offers:
        return
    if "shared-memory" in chosen.needs and not engine[name].virtual_time:
        with pytest.raises(hocket.UserError, match="main memory"):
            fit(text, name, "cuda")
        return
    if chosen.lockstep or engine[name].virtual_time:
        # Few steps: gap-aware tempering of foreseen movements doubles a rounding error in a step or two.
        few: dict[str, Any] = {"epochs": None, "steps": 10}
        found, plain = fit(text, name, "cuda", **few), fit(text, name, "cpu", **few)
        for key, tensor in plain.state.items():
            torch.testing.assert_close(found.state[key], tensor, rtol=1e-2, atol=1e-3)
    else:
        found = fit(text, name, "cuda")
        assert found.test_accuracy is not None and found.test_accuracy > 0.3


@pytest.mark.parametrize("text", ["allreduce", "server:mode=async", "gossip:kind=adpsgd", "local-sgd:momentum=average"])
def test_a_run_on_a_gpu_goes_on_from_a_checkpoint(tmp_path: Path, text: str) -> None:
    whole = fit(text, "sim", "cuda", epochs=4, checkpoint_every="1", out=tmp_path / "whole")
    fit(text, "sim", "cuda", epochs=2, checkpoint_every="1", out=tmp_path / "part")
    longer = hocket.resume(tmp_path / "part", progress=False, epochs=4)
    for key, tensor in whole.state.items():
        torch.testing.assert_close(longer.state[key], tensor)


SCRIPT = """
import sys, torch, hocket
from torch import nn
from torch.utils.data import TensorDataset
g = torch.Generator().manual_seed(0)
x = torch.rand(600, 2, generator=g) * 4 - 2
data = TensorDataset(x, ((x**2).sum(1) < 1.5).long())
model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
with hocket.join(strategy=sys.argv[1]) as team:
    model, optimizer = team.prepare(model, optimizer)
    for epoch in range(8):
        for inputs, targets in team.shard(data, batch_size=20):
            loss = nn.functional.cross_entropy(model(inputs.cuda()), targets.cuda())
            optimizer.zero_grad(); loss.backward(); optimizer.step()
right = (model(x.cuda()).argmax(-1).cpu() == data.tensors[1]).float().mean()
sys.stdout.write(f"accuracy {right:.3f}\\n")  # in one piece: ranks may be threads
sys.stdout.flush()
"""


@pytest.mark.parametrize("name", ["mpi", "torch", "threads"])
@pytest.mark.parametrize("text", ["allreduce", "server:mode=async", "gossip", "elastic"])
def test_the_own_loop_on_a_gpu(tmp_path: Path, name: str, text: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "hocket", "launch", "-n", "3", "--engine", name, str(script), text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    # Open MPI may put escapes around a line
    scores = [float(found) for found in re.findall(r"accuracy ([0-9.]+)", done.stdout)]
    assert len(scores) == 3 - strategy.make(text).server_ranks() and min(scores) > 0.8
