"""Whether a result.json has the form that runs give it: files may be damaged, or of another version."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from hocket.measure.result import COMMUNICATION, TIMES, Result

_FORMS: dict[str, Any] = typing.get_type_hints(Result) | {
    "curve": list[dict[str, float | None]],
    "per_worker": list[dict[str, float | None]],
    "lower_is_better": bool,
}
_POINT = ("epoch", "samples", "seconds")
"""What every point of a curve has."""
_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def check(result: Mapping[str, Any]) -> None:
    """Refuse values of another kind than a run writes. A run that was cut off knows less: None is always right."""
    for name in ("task", "verdict", "engine"):
        if result[name] is None:
            raise ValueError(f"its {name} is not known")
    for name, form in _FORMS.items():
        value = result.get(name)
        if value is not None and not _fits(value, form):
            raise ValueError(f"its {name} is not {_words(form)}")
    metric = result.get(f"test_{result.get('metric')}")
    if metric is not None and not _fits(metric, float):
        raise ValueError(f"its test_{result['metric']} is not a number")
    for point in result.get("curve") or []:
        _numbers(point, _POINT, "a point of its curve")
    for worker in result.get("per_worker") or []:
        if TIMES[0] in worker:
            _numbers(worker, ("seconds", *TIMES, *COMMUNICATION), "an entry of its per_worker")
    if stale := result.get("staleness"):
        _numbers(stale, ("mean",), "its staleness")
        if not _fits(stale["histogram"], dict[str, int]) or not all(map(str.isdigit, stale["histogram"])):
            raise ValueError("the histogram of its staleness does not count updates")


def _numbers(table: Mapping[str, Any], names: tuple[str, ...], what: str) -> None:
    for name in names:
        if not _fits(table.get(name), float):
            raise ValueError(f"{what} has no number of {name}")


def _fits(value: Any, form: Any) -> bool:
    origin, args = typing.get_origin(form), typing.get_args(form)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, one) for one in args)
    if origin is Literal:
        return value in args
    if origin is list:
        return isinstance(value, list) and all(_fits(one, args[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(one, args[1]) for one in value.values())
    if form is float:
        return type(value) in (int, float) and math.isfinite(value)
    return form is Any or type(value) is form


def _words(form: Any) -> str:
    origin, args = typing.get_origin(form), typing.get_args(form)
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    named = next((_WORDS[one] for one in (form, *args) if one in _WORDS), "")
    return "a list as runs write it" if origin is list else "a table as runs write it" if origin is dict else named
