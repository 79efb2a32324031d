"""What tuning tries: `lr`, `lr=0.001..1` or `every=4,8,16` as values, and a run's settings with such values put in."""

from __future__ import annotations

import dataclasses
import math
import random
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hocket.core.errors import UserError
from hocket.core.registry import convert, options, unknown
from hocket.run.idle import why_idle
from hocket.run.spec import RunSpec, settings, type_of
from hocket.run.train import Training
from hocket.strategies import strategy

SETTINGS = ("lr", "batch", "momentum")
"""What can be tuned of every run; the rest are options of its strategy."""
MOST_CANDIDATES = 24
"""Of a larger grid so many are drawn at random."""
MOST_VALUES = 100
"""Of one thing that is tuned."""
_DECADE = (1, 2, 5)
"""Steps of a log grid that give round numbers."""
_LR_FACTORS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_FACTORS = (0.25, 0.5, 1, 2, 4)
"""Of a number of another kind."""
_MOMENTA = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99)

Values = Mapping[str, Any]
"""One value for each thing that is tuned."""


@dataclass(frozen=True)
class Wish:
    """What `--tune` says: a name, and the values as the user wrote them, if any."""

    name: str
    given: str

    @classmethod
    def read(cls, text: str) -> Wish:
        name, equals, given = text.partition("=")
        if equals and not given.strip():
            raise UserError(f"--tune {text}: no values are given; write {name}=0.01,0.1 or a range like {name}=0.01..1")
        return cls(name.strip().replace("-", "_"), given.strip())


def read(texts: Sequence[str], strategies: Sequence[str]) -> list[Wish]:
    """What shall be tuned; each must be known to one of the strategies at least."""
    wishes = [Wish.read(text) for text in texts]
    known = {*SETTINGS, *(name for text in strategies for name in _options(text))}
    for i, wish in enumerate(wishes):
        if wish.name not in known:
            names = " or ".join(dict.fromkeys(strategy.split(text)[0] for text in strategies))
            raise UserError(f"--tune: {unknown(f'setting to tune, nor option of {names},', wish.name, known)}")
        if wish.name in {other.name for other in wishes[:i]}:
            raise UserError(f"--tune {wish.name} is given twice; put all its values into one")
    works = {wish.name for text in strategies for wish in fitting(wishes, text)}
    for wish in wishes:
        if wish.name not in works:
            chosen = next(made for made in map(strategy.make, strategies) if wish.name in made.idle())
            raise UserError(f"--tune {wish.name}: {why_idle(chosen, wish.name)} in {chosen.name}; leave it out")
    return wishes


def fitting(wishes: Sequence[Wish], text: str) -> list[Wish]:
    """What can be tuned under a strategy: what has an effect there, or may have by what is tuned beside it."""
    names = {wish.name for wish in wishes}
    idle = {name for name, by in strategy.make(text).idle().items() if by not in names}
    return [wish for wish in wishes if wish.name in SETTINGS or wish.name in _options(text).keys() - idle]


def candidates(wishes: Sequence[Wish], training: Training) -> list[Values]:
    """The grid of all values that are tried in place of a run's own, or a sample of it."""
    axes = {wish.name: _values(wish, training) for wish in fitting(wishes, training.spec.strategy)}
    count = math.prod(map(len, axes.values()))
    chosen: Sequence[int] = range(count)
    if count > MOST_CANDIDATES:
        chosen = sorted(random.Random(training.spec.seed).sample(chosen, MOST_CANDIDATES))
    return [_point(axes, index) for index in chosen]


def _point(axes: dict[str, list[Any]], index: int) -> Values:
    """A point of the grid by its number, in which the last axis counts fastest."""
    found = {}
    for name, values in reversed(axes.items()):
        index, at = divmod(index, len(values))
        found[name] = values[at]
    return dict(reversed(found.items()))


def applied(spec: RunSpec, values: Values) -> RunSpec:
    """The run with these values."""
    name, rest = strategy.split(spec.strategy)
    given = dict(part.split("=", 1) for part in rest.split(",") if part)
    given = {key.strip().replace("-", "_"): value for key, value in given.items()}
    given |= {key: written(value) for key, value in values.items() if key not in SETTINGS}
    text = ":".join(filter(None, [name, ",".join(f"{key}={value}" for key, value in given.items())]))
    return dataclasses.replace(spec, strategy=text, **{key: values[key] for key in SETTINGS if key in values})


def described(values: Values) -> str:
    return ", ".join(f"{name}={written(value)}" for name, value in values.items())


def written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _options(text: str) -> dict[str, Any]:
    """The options of a strategy, with the values that it has."""
    made = strategy.make(text)
    return {option.name: getattr(made, option.name) for option in options(type(made))}


def _values(wish: Wish, training: Training) -> list[Any]:
    """Two values or more, in order."""
    spec = training.spec
    kind = type_of(settings()[wish.name]) if wish.name in SETTINGS else _kind(wish.name, spec.strategy)
    what = f"--tune {wish.name}"
    if not wish.given:
        values = _around(wish.name, kind, training)
    elif ".." in wish.given:
        low, _, high = wish.given.partition("..")
        values = _range(wish.name, convert(low, kind, what), convert(high, kind, what), what)
    else:
        values = [convert(part.strip(), kind, what) for part in wish.given.split(",")]
    values = list(dict.fromkeys(values))
    if len(values) > MOST_VALUES:
        raise UserError(f"{what}: more than {MOST_VALUES} values are too many; give fewer, or a shorter range")
    if len(values) < 2:
        raise UserError(f"{what}: there must be two values or more; write {wish.name}=A,B or {wish.name}=A..B")
    return values


def _kind(name: str, text: str) -> Any:
    return typing.get_type_hints(type(strategy.make(text)))[name]


def _around(name: str, kind: Any, training: Training) -> list[Any]:
    """Values around the run's own."""
    spec = training.spec
    if typing.get_origin(kind) is typing.Literal:
        return list(typing.get_args(kind))
    if kind is bool:
        return [False, True]
    if name == "momentum":
        return list(_MOMENTA)
    own = getattr(spec, name) if name in SETTINGS else _options(spec.strategy)[name]
    if not isinstance(own, (int, float)) or not math.isfinite(own) or own <= 0:
        raise UserError(f"--tune {name}: its own value {own} gives no range; write {name}=A,B or {name}=A..B")
    scaled = [_rounded(own * factor, kind) for factor in (_LR_FACTORS if name == "lr" else _FACTORS)]
    return [value for value in scaled if _works(name, value, training)]


def _works(name: str, value: Any, training: Training) -> bool:
    if name == "batch":
        return 1 <= int(value) * training.plan.accumulate <= len(training.train) // training.plan.workers
    if name in SETTINGS:
        return True
    try:
        strategy.make(applied(training.spec, {name: value}).strategy).check(training.plan.workers)
    except UserError:
        return False
    return True


def _range(name: str, low: Any, high: Any, what: str) -> list[Any]:
    """A log grid from low to high, both of them in it: whole numbers double, others go by 1, 2, 5, 10."""
    if isinstance(low, (str, bool)):
        raise UserError(f"{what}: {low} and {high} are no numbers; write the values, {name}={low},{high}")
    if low >= high:
        raise UserError(f"{what}: nothing lies between {low:g} and {high:g}; write {name}=LOW..HIGH")
    if name == "momentum":
        return [low, *(m for m in _MOMENTA if low < m < high), high]
    if low <= 0:
        raise UserError(f"{what}: the range is logarithmic and must begin above 0, got {low:g}")
    values, step = [low], 0
    while values[-1] < high and len(values) <= MOST_VALUES:
        step += 1
        factor = 2**step if isinstance(low, int) else _DECADE[step % 3] * 10.0 ** (step // 3)
        values.append(min(_rounded(low * factor, type(low)), high))
    return values


def _rounded(value: float, kind: Any) -> Any:
    return max(1, round(value)) if kind is int or kind == int | None else float(f"{value:.6g}")
