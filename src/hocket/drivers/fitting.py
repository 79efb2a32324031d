"""Which run a checkpoint fits: the same model, strategy and optimizer, and where that is possible other workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hocket.core.comm import Comm
from hocket.core.errors import UserError
from hocket.drivers.checkpoint import Checkpoint
from hocket.layouts.mesh import Layout


def check(path: Path, saved: dict[str, Any], here: dict[str, Any]) -> None:
    """Refuse a checkpoint of something else than what is trained here, in one line."""
    for name, what in (
        ("parameters", "number of parameters"),
        ("strategy", "strategy"),
        ("servers", "number of servers"),
        ("optimizer", "optimizer"),
    ):
        if saved.get(name) != here[name]:
            here_it_is = f"here it is {here[name]}; train with what was saved"
            raise UserError(f"{path}: the checkpoint's {what} is {saved.get(name)}, {here_it_is}")
    if saved.get("model") != here["model"]:
        raise UserError(
            f"{path}: the checkpoint's parameters have other names, shapes or order in memory (channels_last) than "
            f"the model's; train with the model that was saved"
        )


def for_workers(path: Path, found: Checkpoint, here: dict[str, Any]) -> Checkpoint:
    """The checkpoint for as many workers as there are here.

    Another number than was saved is possible where every worker had the same state, nobody had sent anything, and an
    epoch had just ended: then each worker of any number can set out from it.
    """
    saved, workers, about = found.about["workers"], here["workers"], found.about
    if saved == workers:
        return found
    first, *others = found.states
    if "parts" in first:
        raise UserError(
            f"{path} was saved by {saved} workers whose models are split, each part with a state of its own: it goes "
            f"on with as many and in that layout; use data={saved} in it"
        )
    has_epochs = "steps_per_epoch" in about  # a loop of the user's has none that are known here
    at_the_end = has_epochs and about["step"] % about["steps_per_epoch"] == 0
    alike = all(_alike(first[key], other[key]) for other in others for key in ("replica", "optimizer", "kept"))
    shared = about["servers"] or any(state["mail"] or state["shared"] for state in found.states)
    if shared or not at_the_end or not alike:
        early = "not at the end of an epoch" if has_epochs else "in a loop of your own"
        why = "not all in the same state" if at_the_end else early
        raise UserError(f"{path} was saved by {saved} workers, {why}: it goes on with as many; use {saved} workers")
    step = about["step"] // about["steps_per_epoch"] * here["steps_per_epoch"]
    states = [found.states[r] if r < saved else _newcomer(first) for r in range(workers)]
    known = {key: step if first["driver"][key] == about["step"] else 0 for key in ("judged", "kept")}
    driver = first["driver"] | known | {"regrouped": True}
    return Checkpoint(about, [state | {"step": step, "driver": driver} for state in states])


def layout_of(about: Mapping[str, Any], layout: str) -> str:
    """The layout, with the stages that a pipeline of that run had: measured again, they might come out otherwise."""
    wanted, stages = Layout.parse(layout), about.get("stages", "")
    if wanted.stages or wanted.pipeline == 1 or stages.count("+") != wanted.pipeline - 1:
        return layout
    return str(dataclasses.replace(wanted, stages=stages))


def part_of(state: dict[str, Any], ensemble: Comm | None, mark: str) -> dict[str, Any]:
    """Of the states of a split model's parts the one of this rank among its `ensemble`, if its part bears that mark."""
    parts: list[dict[str, Any]] = state.get("parts", [])
    if ensemble is None or len(parts) != ensemble.size or parts[ensemble.rank]["part"] != mark:
        raise UserError(
            "under this strategy each part of a split model has a state of its own; go on with the layout that was "
            "saved"
        )
    return parts[ensemble.rank]


def _newcomer(state: dict[str, Any]) -> dict[str, Any]:
    """A worker that joins with the state of another has no history, and draws numbers of its own."""
    nothing = {
        "bytes_sent": 0,
        "messages": 0,
        "sending_s": 0.0,
        "waiting_s": 0.0,
        "transferring_s": 0.0,
        "hidden_s": 0.0,
    }
    common = {"common": state["random"]["common"]}
    return state | {"totals": nothing, "samples": 0, "staleness": {}, "random": common}


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_alike(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return isinstance(b, type(a)) and len(a) == len(b) and all(map(_alike, a, b))
    return bool(a == b)
