"""Learning-rate schedules by name: those of torch.optim.lr_scheduler, worked out beforehand, step by step.

So a rate depends on the step alone: workers that take steps in any order agree on it, and nothing need be saved.
"""

from __future__ import annotations

import inspect
import math
import re
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from hocket.core.errors import UserError, shown
from hocket.core.registry import unknown
from hocket.optim import on_parameters

_NEED_MORE = {"LRScheduler", "LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau"}
"""Those that are made from functions, from other schedules, or that look at a metric: not to be written as text."""
Own = Callable[[torch.optim.Optimizer, int], lr_scheduler.LRScheduler]
"""Makes a schedule for an optimizer and a run of that many epochs, or steps."""
OWN = "own"
"""The name of a schedule that the task makes itself."""
_LENGTHS = ("T_max", "total_steps")
"""Options that are the length of the run unless they are given."""
_LISTS = ("milestones",)
_CHANGED = ("lr", "momentum", "betas")
_LARGEST = 1e35

SCHEDULES: dict[str, Any] = {
    re.sub(r"(?<!^)(?=[A-Z])", "-", name.removesuffix("LR")).lower(): cls
    for name, cls in vars(lr_scheduler).items()
    if isinstance(cls, type) and issubclass(cls, lr_scheduler.LRScheduler) and name not in _NEED_MORE | {"_LRScheduler"}
}
"""`cosine-annealing` is CosineAnnealingLR."""


def settings(name: str) -> dict[str, Any]:
    """The options of a schedule with their defaults; what must be given has `inspect.Parameter.empty`."""
    if name == OWN:
        return {}
    parameters = inspect.signature(SCHEDULES[name]).parameters.values()
    return {p.name: p.default for p in parameters if p.name not in ("optimizer", "last_epoch", "verbose")}


def parse(text: str) -> tuple[str, dict[str, Any], bool]:
    """`step:step_size=3,per=step` as a name, options, and whether the rate changes from step to step."""
    given, _, rest = text.partition(":")
    name = next((known for known in SCHEDULES if _plain(known) == _plain(given)), given)
    if name not in SCHEDULES and name != OWN:
        if any(_plain(more) == _plain(given) for more in _NEED_MORE - {"ReduceLROnPlateau"}):
            raise UserError(f"schedule {given} is made from functions or other schedules: give one as Task.schedule")
        raise UserError(unknown("schedule", given, [*SCHEDULES, OWN]))
    known, chosen, per = settings(name), {}, "epoch"
    for part in filter(None, rest.split(",")):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not value:
            raise UserError(f"schedule {name}: option {key} needs a value; write {key}=VALUE")
        if key == "per":
            per = value
        elif key not in known:
            raise UserError(unknown(f"option of schedule {name}", key, [*known, "per"]))
        else:
            chosen[key] = _value(value)
            if key in _LISTS and not isinstance(chosen[key], list):
                chosen[key] = [chosen[key]]
    if per not in ("epoch", "step"):
        raise UserError(f"schedule {name}: per must be epoch or step; got {shown(per)}")
    return name, chosen, per == "step"


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").removesuffix("lr")


def _value(text: str) -> Any:
    """A number, true or false, several numbers as 10/20/30, or a word."""
    if "/" in text:
        return [_value(part) for part in text.split("/")]
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _take_no_step(_: torch.optim.Optimizer) -> None:
    pass


class Rates:
    """What a schedule makes of an optimizer's rate, by number of the step or epoch, from 0 on."""

    def __init__(self, text: str, optimizer: str, lr: float, momentum: float, length: int, own: Own | None) -> None:
        name, chosen, self.per_step = parse(text)
        self._text = text
        known = settings(name)
        for option in _LENGTHS:
            if option in known and not chosen.keys() & {option, "epochs", "steps_per_epoch"}:
                chosen[option] = length
        if "max_lr" in known:
            chosen.setdefault("max_lr", lr)
        if missing := [
            key for key, default in known.items() if default is inspect.Parameter.empty and key not in chosen
        ]:
            raise UserError(f"schedule {name}: option {missing[0]} needs a value; write {name}:{missing[0]}=VALUE")
        self._optimizer = on_parameters(optimizer, [nn.Parameter(torch.zeros(1))], lr, momentum)
        # A real step would load torch.compile, which takes seconds, in the middle of the run
        self._optimizer.step = types.MethodType(_take_no_step, self._optimizer)  # type: ignore[method-assign]
        if name == OWN:
            self._schedule = self._made(own, length)
        else:
            try:
                self._schedule = SCHEDULES[name](self._optimizer, **chosen)
            except Exception as error:
                raise self._refused(error) from error
        self._rates = [self._now()]

    def at(self, number: int) -> dict[str, Any]:
        while len(self._rates) <= number:
            self._optimizer.step()  # torch warns where it is left out
            try:
                self._schedule.step()
            except (TypeError, ValueError) as error:
                raise self._refused(error) from error
            self._rates.append(self._now())
        return self._rates[number]

    def _made(self, own: Own | None, length: int) -> lr_scheduler.LRScheduler:
        if own is None:
            raise UserError(f"schedule {OWN} is a function on the task, Task.schedule, and this task has none")
        made = own(self._optimizer, length)
        if not isinstance(made, lr_scheduler.LRScheduler) or isinstance(made, lr_scheduler.ReduceLROnPlateau):
            what = "one of torch.optim.lr_scheduler that looks at no metric"
            raise UserError(f"Task.schedule must give {what}; got {shown(made)}")
        return made

    def _now(self) -> dict[str, Any]:
        (group,) = self._optimizer.param_groups
        found = {key: group[key] for key in _CHANGED if key in group}
        found["lr"] = float(found["lr"])
        if not 0 <= found["lr"] < _LARGEST or math.isnan(found["lr"]):
            raise UserError(
                f"schedule {self._text}: the rate must stay at 0 or more and finite; it came to {found['lr']:g}"
            )
        return found

    def _refused(self, error: Exception) -> UserError:
        return UserError(f"schedule {self._text}: {' '.join(str(error).split())}")
