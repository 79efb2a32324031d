"""Names for things that users choose by one string, such as `local-sgd:every=16,momentum=reset`."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Literal, TypeVar

from hocket.core.errors import UserError, shown

T = TypeVar("T")
_ELSEWHERE = re.compile(r"(?P<name>(?:.+\.py|\w+(?:\.\w+)*):[A-Za-z_][\w-]*)(?::(?P<options>.*))?")
"""What stands in a user's own file or module: `path/to/file.py:name:options`, `package.module:name`."""


class Registry(Generic[T]):
    """Frozen dataclasses by name; a dataclass's fields are its options."""

    def __init__(self, kind: str, plural: str) -> None:
        self.kind, self.plural = kind, plural
        self._classes: dict[str, type[T]] = {}
        self.find: Callable[[str, str], type[T]] | None = None
        """Finds what stands in a user's own file or module, by place and name; given by who can load those."""

    def __call__(self, name: str) -> Callable[[type[T]], type[T]]:
        """A class decorator that registers under `name`."""

        def register(cls: type[T]) -> type[T]:
            if name in self._classes and not _is_same(self._classes[name], cls):
                raise UserError(f"two {self.plural} are called {name}; give yours another name")
            cls.name = name  # type: ignore[attr-defined]
            self._classes[name] = cls
            return cls

        return register

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._classes))

    def __getitem__(self, name: str) -> type[T]:
        if name in self._classes:
            return self._classes[name]
        place, colon, own = name.rpartition(":")
        if colon and self.find is not None:
            return self.find(place, own)
        known, *rest = re.split("[,= ]", name, maxsplit=1)
        if rest and known in self._classes:
            raise UserError(f"no {self.kind} is called {shown(name)}; options follow a colon: {known}:{rest[0]}")
        raise UserError(unknown(self.kind, name, self))

    def make(self, text: str) -> T:
        """The object that `name:option=value,...` describes."""
        name, rest = self.split(text)
        cls = self[name]
        return cls(**parse_options(cls, f"{self.kind} {name}", rest))

    def split(self, text: str) -> tuple[str, str]:
        """The name and the options of `name:options`; a name in a user's own file has a colon, `file.py:name`."""
        name, _, rest = text.partition(":")
        if name not in self._classes and (found := _ELSEWHERE.fullmatch(text)):
            return found["name"], found["options"] or ""
        return name, rest

    def lines(self) -> Iterator[tuple[str, str, str]]:
        """(name, options with their defaults, one line of description), by name."""
        for name in self:
            cls = self._classes[name]
            doc = (cls.__doc__ or "").strip().partition("\n")[0]
            yield name, ", ".join(f"{o.name}={o.default}" for o in options(cls)), doc


def _is_same(a: type[Any], b: type[Any]) -> bool:
    """Whether two classes come from the same lines, which were run twice: as a script, and as a module."""
    files = [{code.co_filename for m in vars(c).values() if (code := getattr(m, "__code__", None))} for c in (a, b)]
    return a.__qualname__ == b.__qualname__ and bool(files[0] & files[1] - {"<string>"})  # dataclasses write methods


def filled_in(default: Any) -> Any:
    """A field that Hocket fills in from the run's settings: it is no option."""
    return dataclasses.field(default=default, metadata={"filled_in": True})


def options(cls: type[Any]) -> list[dataclasses.Field[Any]]:
    """The fields that a user may set."""
    return [f for f in dataclasses.fields(cls) if f.init and "filled_in" not in f.metadata]


def described(made: Any) -> str:
    """The shortest text that makes it: its name, and the options that are not at their defaults."""
    chosen = ((o.name, getattr(made, o.name), o.default) for o in options(type(made)))
    text = ",".join(f"{name}={value}" for name, value, default in chosen if value != default)
    return f"{made.name}:{text}" if text else str(made.name)


def parse_options(cls: type[Any], owner: str, text: str) -> dict[str, Any]:
    """`a=1,b=x` as constructor arguments of `cls`, each converted to its field's type."""
    known = {f.name for f in options(cls)}
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        key = key.strip().replace("-", "_")
        if key not in known:
            raise UserError(unknown(f"option of {owner}", key, known))
        if not equals:
            raise UserError(f"{owner}: option {key} needs a value; write {key}=VALUE")
        if key in values:
            raise UserError(f"{owner}: option {key} is given twice; leave one out")
        default = next(f.default for f in options(cls) if f.name == key)
        if default == math.inf and value.strip() == "inf":
            values[key] = default
        else:
            values[key] = convert(value.strip(), hints[key], f"{owner}: {key}")
            if isinstance(values[key], int) and abs(values[key]) >= 2**63:
                raise UserError(f"{owner}: {key} must be less than 2**63; got {shown(value)}")
    return values


def convert(value: Any, to: Any, what: str) -> Any:
    """`value` (text, or what a TOML file gave) as the type `to`; refuses what does not fit."""
    origin, args = typing.get_origin(to), typing.get_args(to)
    if origin in (types.UnionType, typing.Union):
        if value is None or value == "none":
            return None
        return convert(value, next(a for a in args if a is not type(None)), what)
    if origin is Literal:
        if value not in args:
            raise UserError(f"{what} must be one of {', '.join(map(str, args))}; got {shown(value)}")
        return value
    if to is bool:
        if isinstance(value, bool):
            return value
        if str(value).lower() in ("true", "false"):
            return str(value).lower() == "true"
        raise UserError(f"{what} must be true or false; got {shown(value)}")
    if to in (int, float):
        if isinstance(value, bool):
            raise UserError(f"{what} must be a number; got {shown(value)}")
        try:
            number = to(value)
        except (TypeError, ValueError, OverflowError):
            number = None
        if number is None or (isinstance(value, float) and number != value and value == value):
            noun = "a whole number" if to is int else "a number"
            raise UserError(f"{what} must be {noun}; got {shown(value)}")
        if isinstance(number, float) and not math.isfinite(number):
            raise UserError(f"{what} must be finite; got {shown(value)}")
        return number
    if not isinstance(value, str):
        raise UserError(f"{what} must be text; got {shown(value)}")
    return value


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """One line for a name that does not exist, with the nearest that does."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known) or 'none'}"
    return f"no {kind} is called {shown(name)}; {hint}"
