"""Gradients of many workers in one call on a GPU, and as a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.drivers.batched import Rows
from hocket.drivers.captured import captured

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def task() -> hocket.Task:
    g = torch.Generator().manual_seed(7)
    x = torch.randn(480, 5, generator=g)
    data = x, (x @ torch.randn(5, 3, generator=g)).argmax(-1)
    return hocket.Task(
        model=lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)), data=(data, data), batch=4, epochs=2
    )


def test_a_graph_gives_what_single_calls_give() -> None:
    made, device = task(), torch.device("cuda")
    rows = Rows(made, made.load()[0].to(device), 6)
    replicas = [rows.replica(row, made.build_model(row).train(), device) for row in range(6)]
    for step in range(5):  # of which one captures
        index = torch.arange(24) + 24 * step
        together = rows.gradients(range(6), index)
        found = torch.stack([replica.g.clone() for replica in replicas])
        halves = [rows.gradients(range(at, at + 3), index[4 * at : 4 * at + 12]) for at in (0, 3)]
        torch.testing.assert_close(together, torch.cat(halves))
        torch.testing.assert_close(found, torch.stack([replica.g for replica in replicas]))


def test_what_looks_at_a_value_is_called_as_it_is() -> None:
    def call(x: Tensor) -> Tensor:
        return x * float(x.sum())

    x = torch.arange(3.0, device="cuda")
    assert captured(call, x)(x).tolist() == [0.0, 3.0, 6.0]


@pytest.mark.parametrize("name", ["sim", "fleet"])
@pytest.mark.parametrize("text", ["allreduce", "local-sgd:every=3", "diloco:every=3"])
def test_a_gpu_gives_what_the_cpu_gives(text: str, name: str) -> None:
    runs = [
        hocket.fit(task(), strategy=text, engine=name, workers=24, device=device, progress=False)
        for device in ("cpu", "cuda")
    ]
    assert runs[0].virtual_seconds == runs[1].virtual_seconds
    for key, tensor in runs[0].state.items():
        torch.testing.assert_close(runs[1].state[key], tensor, rtol=1e-3, atol=1e-4)
