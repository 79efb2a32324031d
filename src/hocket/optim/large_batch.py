"""Optimizers for large batches: a step of each layer is scaled by how large the layer is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class LARS(torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling (You 2017, algorithm 1).

    A layer's rate is eta |w| / (|g| + weight_decay |w|); biases and other one-dimensional parameters take plain
    momentum steps, without decay.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        eta: float = 0.001,
    ) -> None:
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, eta=eta))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for w in group["params"]:
                g = w.grad
                if g is None:
                    continue
                rate = group["lr"]
                if w.dim() > 1:
                    decay = group["weight_decay"]
                    size, slope = w.norm(), g.norm()
                    g = g.add(w, alpha=decay)
                    rate = rate * _ratio(group["eta"] * size, slope + decay * size)
                state = self.state[w]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(w)
                v = state["momentum_buffer"].mul_(group["momentum"]).add_(g * rate)
                w.sub_(v)
        return None


class LAMB(torch.optim.Optimizer):
    """Adam whose step is as long as the layer's weights (You 2020, algorithm 2)."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, dict(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            beta1, beta2 = group["beta1"], group["beta2"]
            for w in group["params"]:
                g = w.grad
                if g is None:
                    continue
                state = self.state[w]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(w), square=torch.zeros_like(w))
                state["step"] += 1
                mean = state["mean"].lerp_(g, 1 - beta1) / (1 - beta1 ** state["step"])
                square = state["square"].mul_(beta2).addcmul_(g, g, value=1 - beta2) / (1 - beta2 ** state["step"])
                u = mean / (square.sqrt() + group["eps"])
                if w.dim() > 1:
                    u = u.add(w, alpha=group["weight_decay"])
                    u = u * _ratio(w.norm(), u.norm())
                w.sub_(u, alpha=group["lr"])
        return None


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 1 where one of them is 0: a layer that is zero, or has no gradient, takes the plain step."""
    return torch.where((a > 0) & (b > 0), a / b, torch.ones_like(a))
