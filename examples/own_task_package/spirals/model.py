"""A small network, and how good it is."""

from __future__ import annotations

from torch import Tensor, nn

from .data import ARMS


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, ARMS))


def accuracy(output: Tensor, arm: Tensor) -> Tensor:
    return (output.argmax(-1) == arm).float().mean()


def top2(output: Tensor, arm: Tensor) -> Tensor:
    """The share of points whose arm is one of the two that the network finds most likely."""
    return (output.topk(2).indices == arm[:, None]).any(-1).float().mean()
