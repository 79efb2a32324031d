"""Which engine runs: the one that was asked for, that a launcher belongs to, or the best that can start."""

from __future__ import annotations

import dataclasses
from typing import Any

from hocket.core.errors import UserError
from hocket.core.registry import options, parse_options
from hocket.core.worker import Need
from hocket.engines.catalogue import Engine, engine
from hocket.run.spec import RunSpec


def named_engine(spec: RunSpec) -> tuple[str, str]:
    """The engine that follows from what the user or a launcher said, and why; empty where nobody said."""
    if spec.engine is not None:
        engine_class(spec.engine)  # refuses an unknown one, with the nearest name
        return spec.engine, ""
    if spec.sim:
        return _simulator(), " (because of --sim)"
    for name in engine:
        if launcher := engine[name].launched_by():
            return name, f" (started by {launcher})"
    if spec.hosts:
        return next(name for name in engine if engine[name].spans_hosts), " (because of --hosts)"
    return "", ""


def best_engine(needs: frozenset[Need] = frozenset(), *, compiled: bool = False, named: bool = True) -> tuple[str, str]:
    """The best engine that can start here and has what a strategy `needs`, and why: for `compiled` workers, for a task
    with or without a name."""
    if compiled:
        return next(name for name in engine if engine[name].runs_compiled), " (compiled workers)"
    reason = " (default)"
    for cls in sorted((engine[name] for name in engine), key=lambda cls: -cls.preference):
        if why := cls.unavailable():
            reason = f" ({why})"
        elif not needs <= cls.offers:
            reason = f" ({cls.name} lacks {', '.join(sorted(needs - cls.offers))})"
        elif cls().starts_processes() and not named:
            reason = " (the task has no name that fresh processes could find)"
        else:
            return cls.name, reason
    raise AssertionError("an engine within this process can always start")


def engine_class(text: str) -> type[Engine]:
    return engine[text.partition(":")[0]]


def make_engine(spec: RunSpec, text: str, workers: int) -> Engine:
    """The engine, with the settings that concern it."""
    cls = engine_class(text)
    known = _options(cls)
    for name in ("hosts", "mpiexec"):
        if getattr(spec, name) and name not in known:
            able = " or ".join(other for other in engine if name in _options(engine[other]))
            raise UserError(f"--{name} has no meaning on engine {cls.name}; leave it out, or use --engine {able}")
    if spec.sim and not cls.virtual_time:
        raise UserError(f"--sim has no meaning on engine {cls.name}; leave it out, or add --engine {_simulator()}")
    chosen = parse_options(cls, f"engine {cls.name}", text.partition(":")[2])
    chosen |= parse_options(cls, cls.name, ",".join(f"{k}={v}" for k, v in spec.sim.items()))
    own: dict[str, Any] = {name: getattr(spec, name) for name in ("deadline", "hosts", "mpiexec", "bind", "seed")}
    given = {name: value for name, value in (own | {"workers": workers}).items() if name in _fields(cls)}
    return cls(**(given | chosen))


def _simulator() -> str:
    """The engine with virtual time that runs most."""
    return max((name for name in engine if engine[name].virtual_time), key=lambda name: len(engine[name].offers))


def _options(cls: type[Engine]) -> set[str]:
    return {option.name for option in options(cls)}


def _fields(cls: type[Any]) -> set[str]:
    """The options, and what is filled in from the run's settings."""
    return {field.name for field in dataclasses.fields(cls)}
