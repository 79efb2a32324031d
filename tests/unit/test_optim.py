"""Optimizers by name, on the flat vector."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hocket import optim
from hocket.core.vector import FlatModel


def model() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def trained(steps: int, step_with_torch: bool, text: str, momentum: float) -> torch.Tensor:
    flat = FlatModel(model())
    optimizer = optim.make(text, flat, 0.1, momentum)
    step = optimizer.step if step_with_torch else optim.step_of(optimizer)
    for i in range(steps):
        flat.g.copy_(torch.sin(torch.arange(flat.g.numel()) + i) + 0.1 * flat.x)
        step()
    return flat.x.clone()


@settings(max_examples=60, deadline=None)
@given(
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    decay=st.sampled_from([0.0, 0.01]),
    dampening=st.sampled_from([0.0, 0.3]),
    nesterov=st.booleans(),
    maximize=st.booleans(),
)
def test_the_short_step_of_sgd_is_torchs(
    momentum: float, decay: float, dampening: float, nesterov: bool, maximize: bool
) -> None:
    nesterov = nesterov and momentum > 0 and dampening == 0  # torch refuses the rest
    text = f"sgd:weight_decay={decay},dampening={dampening},nesterov={nesterov},maximize={maximize}"
    assert trained(5, True, text, momentum).equal(trained(5, False, text, momentum))


@pytest.mark.parametrize("name", optim.ELEMENTWISE)
def test_one_flat_parameter_is_many_shaped_ones(name: str) -> None:
    """Why an optimizer may run on the flat vector: its rule is elementwise."""
    reference = model()
    cls = optim.ELEMENTWISE[name]
    shaped = cls(reference.parameters(), lr=0.1)
    for i in range(4):
        flat_gradient = torch.sin(torch.arange(26.0) + i)
        at = 0
        for p in reference.parameters():
            p.grad = flat_gradient[at : at + p.numel()].view_as(p).clone()
            at += p.numel()
        shaped.step()

    flat = FlatModel(model())
    optimizer = optim.make(name, flat, 0.1, 0.0)
    for i in range(4):
        flat.g.copy_(torch.sin(torch.arange(26.0) + i))
        optim.step_of(optimizer)()
    expected = torch.cat([p.detach().reshape(-1) for p in reference.parameters()])
    torch.testing.assert_close(flat.x, expected)
