"""State that has a name: what a strategy, an optimizer or a generator must keep for a run to be taken up again.

A state is made of tensors, numbers, text, None, lists, tuples, sets, dicts with keys that are numbers or text,
messages, weights, and objects that derive from `State`. It becomes JSON and a few named tensors, never a pickle.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from hocket.core.message import Message
from hocket.core.weight import Weight

T = TypeVar("T")
Tensors = dict[str, Tensor]


class State(SimpleNamespace):
    """An object whose attributes are its state, but for those that begin with an underscore."""

    def saved(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


class Kept:
    """What one rank keeps, by name: objects that are changed in place, so that they can be filled again."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def keep(self, name: str, value: T) -> T:
        assert name not in self.values, f"two things are kept as {name}"
        self.values[name] = value
        return value

    def load(self, saved: dict[str, Any], device: torch.device) -> None:
        """Give everything that is kept the content that was saved under its name."""
        for name, content in moved(saved, device).items():
            refill(self.values[name], content)


def refill(value: Any, saved: Any) -> None:
    """Give an object that is changed in place the content that another had when it was saved."""
    match value:
        case Tensor():
            with torch.no_grad():
                value.copy_(saved)
        case torch.Generator():
            value.set_state(saved)
        case dict():
            value.clear()
            value.update(saved)
        case set():
            value.clear()
            value.update(saved)
        case list():
            for item, kept in zip(value, saved, strict=False):
                if isinstance(item, (Tensor, State)):
                    refill(item, kept)
            if not any(isinstance(item, (Tensor, State)) for item in value):
                value[:] = saved
        case State():
            for name, kept in saved.items():
                mine = getattr(value, name)
                if isinstance(mine, (Tensor, dict, set, list, State)):
                    refill(mine, kept)
                else:
                    setattr(value, name, kept)
        case _:
            raise AssertionError(f"a {type(value).__name__} cannot be kept: it is not changed in place")


def moved(value: Any, device: torch.device) -> Any:
    """The same, with all tensors on a device."""
    match value:
        case Tensor() | Message():
            return value.to(device)
        case dict():
            return {k: moved(v, device) for k, v in value.items()}
        case list() | tuple():
            return type(value)(moved(v, device) for v in value)
    return value


def encode(value: Any, name: str, tensors: Tensors) -> Any:
    """`value` as JSON; its tensors go into `tensors`, under names that begin with `name`."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            tensors[name] = value.detach()
            return {"tensor": name}
        case torch.Generator():
            return encode(value.get_state(), name, tensors)
        case State():
            return encode(value.saved(), name, tensors)
        case Message():
            parts = [encode(t, f"{name}.{i}", tensors) for i, t in enumerate(value.tensors)]
            return {"message": value.kind, "ints": list(value.ints), "tensors": parts}
        case Weight():
            return {"weight": [value.samples, value.of_all]}
        case Counter():
            return {"counts": [[k, n] for k, n in value.items()]}
        case dict():
            return {"dict": [[k, encode(v, f"{name}.{k}", tensors)] for k, v in value.items()]}
        case set() | frozenset():
            return {"set": sorted(value)}
        case list() | tuple():
            items = [encode(v, f"{name}.{i}", tensors) for i, v in enumerate(value)]
            return {"tuple": items} if isinstance(value, tuple) else items
    raise TypeError(f"{name}: {type(value).__name__} cannot be saved without pickle")


def decode(value: Any, tensors: Tensors) -> Any:
    """What `encode` was given, but for `State`s, which come back as dicts."""
    match value:
        case list():
            return [decode(v, tensors) for v in value]
        case {"tensor": name}:
            return tensors[name].clone()  # what was alike was written once, and shall not be one from now on
        case {"message": kind, "ints": ints, "tensors": parts}:
            return Message(kind, tuple(ints), tuple(decode(t, tensors) for t in parts))
        case {"weight": [samples, of_all]}:
            return Weight(samples, of_all)
        case {"counts": counts}:
            return Counter(dict(counts))
        case {"dict": items}:
            return {k: decode(v, tensors) for k, v in items}
        case {"set": items}:
            return set(items)
        case {"tuple": items}:
            return tuple(decode(v, tensors) for v in items)
    return value
