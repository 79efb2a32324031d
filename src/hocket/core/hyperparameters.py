"""The numbers of an optimizer that a scheduler may change: what a worker tells a server at every push."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


class Hyperparameters:
    """Rate, momentum and so on, in an order that all optimizers of a kind have."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        # Of the optimizer's own: schedulers put more into a group. The others are switches
        self._names = [
            name for name in sorted(optimizer.defaults) if any(_numbers(g[name]) for g in optimizer.param_groups)
        ]

    def told(self, momentum_elsewhere: bool = False) -> Tensor:
        """As they are now.

        Where the momentum is held elsewhere, they are those of steps along a running mean of gradients that go as far.
        """
        groups = self._optimizer.param_groups
        if momentum_elsewhere:
            groups = [_without_momentum(group) for group in groups]
        found = [number for group in groups for name in self._names for number in _numbers(group[name])]
        return _as_tensor(tuple(found))

    def take_over(self, values: Tensor) -> None:
        """Have those that were told of another optimizer of this kind."""
        left = iter(values.tolist())
        for group in self._optimizer.param_groups:
            for name in self._names:
                old = group[name]
                new = [next(left) for _ in _numbers(old)]
                if new:
                    group[name] = tuple(new) if isinstance(old, tuple) else new[0]


@lru_cache(maxsize=16)  # all workers ask at every step, and mostly for the same
def _as_tensor(numbers: tuple[float, ...]) -> Tensor:
    """To be sent, and not to be changed."""
    return torch.tensor(numbers, dtype=torch.float64)


def _without_momentum(group: dict[str, Any]) -> dict[str, Any]:
    """The settings whose single steps go as far as those of a group that adds up what momentum leaves of the last."""
    if not group.get("momentum"):
        return group
    further = (1 - group.get("dampening", 0.0)) / (1 - group["momentum"])
    return group | {"lr": group["lr"] * further, "momentum": 0.0}


def _numbers(value: Any) -> list[float]:
    """The numbers in one setting of an optimizer: none where it is a switch."""
    if value is None or isinstance(value, bool):
        return []
    if isinstance(value, (float, int)):
        return [float(value)]
    if isinstance(value, tuple):
        return [float(v) for v in value if isinstance(v, (int, float))]
    if isinstance(value, Tensor) and value.numel() == 1:
        return [float(value)]
    return []
