"""Which PyTorch models are the perceptrons that `hocket.kernels.models.dense` computes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def is_altered(module: nn.Module) -> bool:
    """Whether hooks, or a `forward` put in its place, make a module do something else than its class says."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    grad_hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return any("forward" in vars(m) or any(getattr(m, name) for name in hooks) for m in module.modules()) or any(
        getattr(p, name) for p in module.parameters() for name in grad_hooks
    )


def is_cross_entropy(loss: Callable[..., Tensor]) -> bool:
    """Whether a loss is cross-entropy, as a function or as a module, with nothing added."""
    if type(loss) is not nn.CrossEntropyLoss or is_altered(loss):
        return loss is F.cross_entropy
    settings = loss.weight, loss.reduction, loss.ignore_index, loss.label_smoothing
    return settings == (None, "mean", -100, 0.0)


def widths_of(model: nn.Module) -> list[int] | None:
    """The widths of a perceptron, [inputs, hidden ..., classes]: Flatten (or not), then Linear and ReLU in turn.

    It must do just that: hooks, a `forward` of its own, or layers that share their weights make it another model.
    """
    layers = list(model) if type(model) is nn.Sequential else [model]
    if is_altered(model):
        return None
    if layers and type(layers[0]) is nn.Flatten and (layers[0].start_dim, layers[0].end_dim) == (1, -1):
        layers = layers[1:]
    linear = layers[0::2]
    if len(layers) != 2 * len(linear) - 1 or not all(type(layer) is nn.ReLU for layer in layers[1::2]):
        return None
    widths: list[int] = []
    for layer in linear:
        if type(layer) is not nn.Linear or layer.bias is None or layer.weight.dtype != torch.float32:
            return None
        if not (layer.weight.requires_grad and layer.bias.requires_grad) or (
            widths and widths[-1] != layer.in_features
        ):
            return None
        widths += [layer.out_features] if widths else [layer.in_features, layer.out_features]
    distinct = sum(parameter.numel() for parameter in model.parameters())  # a shared one is counted once
    return widths if distinct == sum((a + 1) * b for a, b in pairwise(widths)) else None
