"""Optimizers by name: torch.optim's, on the flat vector where the rule is elementwise."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from hocket.core.errors import UserError
from hocket.core.registry import convert, unknown
from hocket.core.vector import FlatModel

ELEMENTWISE: dict[str, type[torch.optim.Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}


def settings(name: str) -> dict[str, Any]:
    """The options of an optimizer that can be written as text, with their defaults."""
    signature = inspect.signature(ELEMENTWISE[name])
    return {
        p.name: p.default
        for p in signature.parameters.values()
        if isinstance(p.default, (int, float)) and p.name not in ("lr", "momentum")
    }


def takes_momentum(text: str) -> bool:
    return parse(text)[0] in ("sgd", "rmsprop")


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """`adamw:weight_decay=0.1` as a name and its options."""
    name, _, rest = text.partition(":")
    if name not in ELEMENTWISE:
        raise UserError(unknown("optimizer", name, ELEMENTWISE))
    known = settings(name)
    chosen = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        key = key.strip().replace("-", "_")
        if key not in known:
            raise UserError(unknown(f"option of optimizer {name}", key, known))
        chosen[key] = convert(value, type(known[key]), f"optimizer {name}: {key}")
    return name, chosen


def make(text: str, model: FlatModel, lr: float, momentum: float) -> torch.optim.Optimizer:
    """The optimizer, on one parameter that is the whole flat vector: a few large operations a step."""
    name, chosen = parse(text)
    if momentum:
        chosen["momentum"] = momentum
    flat = nn.Parameter(model.x)
    flat.grad = model.g
    # Built through Any: the constructors share no signature.
    cls: Any = ELEMENTWISE[name]
    optimizer: torch.optim.Optimizer = cls([flat], lr=lr, **chosen)
    return optimizer
