"""The settings of a run as flags of a command and as keyword arguments in Python: both from RunSpec's fields."""

from __future__ import annotations

import inspect
import shlex
import typing
from collections.abc import Callable, Collection, Mapping
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from hocket.core.errors import UserError
from hocket.run.spec import Command, RunSpec, override, read_toml, settings, type_of

F = TypeVar("F", bound=Callable[..., Any])


def takes_settings(command: Command) -> Callable[[F], F]:
    """Let a command that has `**settings` take a flag for each; what was not given is None."""

    def extend(function: F) -> F:
        own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.kind != p.VAR_KEYWORD]
        before = [p for p in own if p.kind != p.KEYWORD_ONLY]
        after = [p for p in own if p.kind == p.KEYWORD_ONLY]
        flags = [_flag(name) for name in settings(command) if name not in {p.name for p in own}]
        _describe(function, [*before, *flags, *after])
        return function

    return extend


def _flag(name: str) -> Parameter:
    declared = settings()[name]
    kind = type_of(declared)
    is_table = typing.get_origin(kind) is dict
    metavar = None
    if kind is not bool:  # all that is given is told, so that `collected` can refuse a second value
        one = _of_one_value(kind)
        kind, metavar = list.__class_getitem__(one), "KEY=VALUE" if is_table else f"<{one.__name__}>"
    names = [f"--{name.replace('_', '-')}", *filter(None, [declared.metadata["short"]])]
    option = typer.Option(*names, help=declared.metadata["help"], metavar=metavar, show_default=False)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option])


def _of_one_value(kind: Any) -> Any:
    """The type that is not None; text where RunSpec is to look at it, as it does for a file."""
    if typing.get_origin(kind) in (dict, typing.Literal):
        return str
    return next((other for other in typing.get_args(kind) if other is not type(None)), kind)


def takes_keywords(command: Command) -> Callable[[F], F]:
    """Show the settings that the command takes in the signature of a Python function that has `**settings`, and what
    they mean in its help."""

    def extend(function: F) -> F:
        own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.kind != p.VAR_KEYWORD]
        known = [declared for name, declared in settings(command).items() if name not in {p.name for p in own}]
        defaults = RunSpec("")
        keywords = [
            Parameter(f.name, Parameter.KEYWORD_ONLY, default=getattr(defaults, f.name), annotation=type_of(f))
            for f in known
        ]
        first = [p for p in own if p.kind != p.KEYWORD_ONLY]
        _describe(function, [*first, *keywords, *(p for p in own if p.kind == p.KEYWORD_ONLY)])
        lines = [f"    {f.name}: {f.metadata['help'].partition(' [')[0]}" for f in known if f.metadata["help"]]
        function.__doc__ = f"{(function.__doc__ or '').rstrip()}\n\n" + "\n".join(lines) + "\n"
        return function

    return extend


def _describe(function: Any, parameters: list[Parameter]) -> None:
    """Typer and help() look here."""
    returns = inspect.signature(function, eval_str=True).return_annotation
    function.__signature__ = Signature(parameters, return_annotation=returns)
    function.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": returns}


def collected(words: list[str], flags: Mapping[str, Any], spec: Path | None, without: Collection[str] = ()) -> RunSpec:
    """A spec from the words of a command line: a file's settings, `without` some of them, flags over them, and
    KEY=VALUE over both."""
    values = {key: value for key, value in (read_toml(spec) if spec else {}).items() if key not in without}
    given = {name: value for name, value in flags.items() if value is not None}
    for name, value in given.items():
        if typing.get_origin(type_of(settings()[name])) is dict:  # given entry by entry
            known = values.get(name, {})
            given[name] = {**(known if isinstance(known, dict) else {}), **pairs(value, f"--{name}")}
        elif isinstance(value, list):
            given[name] = _only(name, value)
    override(values, given)
    for i, word in enumerate(words):
        if i == 0 and ("=" not in word or ".py:" in word or ":" in word.partition("=")[0]):
            values["task"] = word
        else:
            override(values, pairs([word], "an override"))
    return RunSpec.from_mapping(values, str(spec) if spec else "")


def _only(name: str, given: list[Any]) -> Any:
    if len(given) > 1:
        several = "; hocket compare takes several" if name in ("strategy", "workers") else ""
        raise UserError(f"--{name.replace('_', '-')} is given {len(given)} times; give it once{several}")
    return given[0]


def as_command(spec: RunSpec) -> str:
    """The command line that `collected` would read the spec from."""
    words, default = ["hocket", "train", spec.task], RunSpec("")
    for name, declared in settings("train").items():
        value = getattr(spec, name)
        if value == getattr(default, name):
            continue
        flag = declared.metadata["short"] or f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag)
        elif isinstance(value, dict):
            words += [word for pair in value.items() for word in (flag, "=".join(pair))]
        else:
            words += [flag, str(value)]
    return shlex.join(words)


def pairs(words: list[str], what: str) -> dict[str, str]:
    """KEY=VALUE words as a mapping."""
    found = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise UserError(f"{what} must be KEY=VALUE, got {word!r}")
        found[key.strip()] = value.strip()
    return found
