"""Options of a strategy that a user wrote and that change nothing."""

from __future__ import annotations

from hocket.core.registry import parse_options
from hocket.strategies import Strategy, strategy


def idle_note(text: str) -> str:
    """One line on the options in `name:option=value,...` that have no effect; empty where all have."""
    chosen = strategy.make(text)
    given = parse_options(type(chosen), chosen.name, strategy.split(text)[1])
    return "; ".join(f"{chosen.name}: {why_idle(chosen, name)}" for name in given if name in chosen.idle())


def why_idle(chosen: Strategy, name: str) -> str:
    """What makes an option have no effect, in words."""
    by = chosen.idle()[name]
    return f"{name} has no effect" + (f" with {by}={getattr(chosen, by)}" if by else "")
