"""Optimizers by name: torch.optim's on the flat vector, where the rule is elementwise, and those that need shapes."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hocket.core.errors import UserError, shown
from hocket.core.registry import convert, unknown
from hocket.core.replica import Replica
from hocket.optim.large_batch import LAMB, LARS

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


LAYERWISE: dict[str, type[torch.optim.Optimizer]] = {"lamb": LAMB, "lars": LARS}
"""These look at each parameter as a whole, so they get the parameters one by one."""

OPTIMIZERS = ELEMENTWISE | LAYERWISE

RATES = {
    "adadelta": 1.0,
    "adagrad": 0.03,
    "adam": 1e-3,
    "adamax": 5e-3,
    "adamw": 1e-3,
    "lamb": 5e-3,
    "lars": 1.0,
    "nadam": 2e-3,
    "radam": 3e-3,
    "rmsprop": 1e-3,
    "sgd": 0.1,
}
"""Rates to begin with, for a task that was made for another optimizer: chosen so that digits and blobs come within
about two points of what they reach with their own."""
MOMENTA = {"lars": 0.9}
"""The same for momentum; 0 for the rest."""

_NOT_OPTIONS = {"lr", "momentum", "capturable", "differentiable"}
"""Settings of the run, and what is for CUDA graphs or for gradients of the steps themselves."""
_BELOW_1 = {"alpha", "beta1", "beta2", "betas", "dampening", "rho"}
"""Weights of running means. Every option that is a number is 0 or more."""
_LEFT_ALONE = "__dynamo_disable"
"""Where torch keeps the form of a function that its compiler does not touch."""
_LARGEST = 1e35
"""Of a rate or an option: float32 ends at 3e38, and products of them must fit."""


@cache  # every worker asks
def settings(name: str) -> dict[str, Any]:
    """The options of an optimizer that can be written as text, with their defaults."""
    signature = inspect.signature(OPTIMIZERS[name])
    return {
        p.name: p.default
        for p in signature.parameters.values()
        if isinstance(p.default, (int, float, tuple)) and p.name not in _NOT_OPTIONS
    }


def takes_momentum(text: str) -> bool:
    return parse(text)[0] in ("sgd", "rmsprop", "lars")


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """`adamw:weight_decay=0.1` as a name and its options."""
    name, _, rest = text.partition(":")
    if name not in OPTIMIZERS:
        raise UserError(unknown("optimizer", name, OPTIMIZERS))
    known = settings(name)
    chosen = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        key = key.strip().replace("-", "_")
        if key not in known:
            raise UserError(unknown(f"option of optimizer {name}", key, known))
        if not equals:
            raise UserError(f"optimizer {name}: option {key} needs a value; write {key}=VALUE")
        chosen[key] = _option(f"optimizer {name}: {key}", key, value.strip(), known[key])
    return name, chosen


def _option(what: str, key: str, value: str, default: Any) -> Any:
    """An option's value; several numbers are written as 0.9/0.98."""
    if isinstance(default, tuple):
        parts = value.split("/")
        if len(parts) != len(default):
            given = "/".join(map(str, default))
            raise UserError(f"{what} must be {len(default)} numbers, such as {given}; got {shown(value)}")
        return tuple(_option(what, key, part.strip(), 0.0) for part in parts)
    kind = bool if isinstance(default, bool) else float  # torch writes some of its floats as 0
    found = convert(value, kind, what)
    limit = 1.0 if key in _BELOW_1 else _LARGEST
    if kind is float and not 0 <= found < limit:
        raise UserError(f"{what} must be at least 0 and less than {limit:g}; got {found:g}")
    return found


def make(text: str, model: Replica, lr: float, momentum: float) -> torch.optim.Optimizer:
    """The optimizer; where it can be, on one parameter that is the whole flat vector: few, large operations a step."""
    if parse(text)[0] in ELEMENTWISE:
        return make_flat(text, model.x, model.g, lr, momentum)
    return on_parameters(text, model.parameters, lr, momentum)


def make_flat(text: str, x: Tensor, g: Tensor, lr: float, momentum: float) -> torch.optim.Optimizer:
    """The optimizer of a vector, or of a part of one, whose shapes are not known."""
    if (name := parse(text)[0]) not in ELEMENTWISE:
        raise UserError(f"a server cannot run optimizer {name}, which looks at whole layers; use sgd or adam")
    flat = nn.Parameter(x)
    flat.grad = g
    return on_parameters(text, [flat], lr, momentum)


def on_parameters(text: str, parameters: list[nn.Parameter], lr: float, momentum: float) -> torch.optim.Optimizer:
    """The optimizer as torch.optim has it, whatever these are parameters of."""
    name, chosen = parse(text)
    if not 0 < lr < _LARGEST:
        raise UserError(f"lr must be greater than 0 and less than {_LARGEST:g}; got {lr:g}")
    if takes_momentum(text):
        chosen["momentum"] = momentum
    elif momentum:
        raise UserError(f"optimizer {name} takes no momentum; leave it out, or use sgd")
    # Built through Any: the constructors share no signature.
    cls: Any = OPTIMIZERS[name]
    try:
        with _without_the_compiler():
            optimizer: torch.optim.Optimizer = cls(parameters, lr=lr, **chosen)
    except ValueError as error:  # options that do not go together
        raise UserError(f"optimizer {text}: {error}") from error
    return optimizer


@contextmanager
def _without_the_compiler() -> Iterator[None]:
    """Inside, an optimizer can be made without torch.compile, which takes longer to import than all of Hocket.

    Its constructor asks the compiler to leave it alone, and loads it for that. Where it is not loaded, nobody compiles.
    """
    plain = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", None)
    if plain is None or "torch._dynamo" in sys.modules or hasattr(plain, _LEFT_ALONE):
        yield
        return
    setattr(plain, _LEFT_ALONE, plain)
    try:
        yield
    finally:
        vars(plain).pop(_LEFT_ALONE, None)


def step_of(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """One step of an optimizer that `make` made, without what torch.optim does around it.

    For SGD, whose arithmetic takes less time than the hooks and profiling around it where the model is small.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        importlib.import_module("torch._dynamo")  # a first step would, inside the clock
        return optimizer.step
    (flat,) = optimizer.param_groups[0]["params"]
    x = flat.data

    def step() -> None:
        group = optimizer.param_groups[0]  # looked up each time, as the state is: loading a state replaces both
        direction = -flat.grad if group["maximize"] else flat.grad
        if group["weight_decay"]:
            direction = direction.add(x, alpha=group["weight_decay"])
        if momentum := group["momentum"]:
            state = optimizer.state[flat]
            velocity = state.get("momentum_buffer")
            if velocity is None:
                velocity = state["momentum_buffer"] = direction.clone()
            else:
                velocity.mul_(momentum).add_(direction, alpha=1 - group["dampening"])
            direction = direction.add(velocity, alpha=momentum) if group["nesterov"] else velocity
        x.add_(direction, alpha=-group["lr"])

    return step


Length = Callable[[Tensor], Tensor]


def clip(g: Tensor, most: float, length: Length = torch.linalg.vector_norm) -> None:
    """Shorten a gradient to this length if it is longer, as torch.nn.utils.clip_grad_norm_ does."""
    g.mul_((most / (length(g) + 1e-6)).clamp(max=1.0))


def clipped(step: Callable[[], object], g: Tensor, most: float, length: Length) -> Callable[[], object]:
    """A step along `g` that is clipped before; `most` 0 is the step as it is. `length` is that of the whole gradient,
    where `g` is a part of it."""
    if not most:
        return step

    def clip_and_step() -> None:
        clip(g, most, length)
        step()

    return clip_and_step


def of_part(optimizer: torch.optim.Optimizer, model: Replica, span: slice) -> torch.optim.Optimizer:
    """An optimizer like the user's for a stretch of the flat vector, with the same groups."""
    if type(optimizer) not in ELEMENTWISE.values():
        name = type(optimizer).__name__
        raise UserError(f"several servers cannot share optimizer {name}, which may look at whole layers; use servers=1")
    group_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    groups: list[dict[str, Any]] = [dict(group, params=[]) for group in optimizer.param_groups]
    at = 0
    for p in model.parameters:
        begin, end = max(at, span.start), min(at + p.numel(), span.stop)
        if begin < end and id(p) in group_of:
            part = nn.Parameter(model.x[begin:end])
            part.grad = model.g[begin:end]
            groups[group_of[id(p)]]["params"].append(part)
        at += p.numel()
    cls: Any = type(optimizer)
    made: torch.optim.Optimizer = cls(groups, lr=optimizer.param_groups[0]["lr"])
    return made
