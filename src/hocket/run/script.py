"""A user's script as each rank runs it: as `python script.py` or `python -m package.module` would."""

from __future__ import annotations

import importlib.util
import sys
import threading
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from hocket.core.comm import Rank
from hocket.core.errors import UserError

_space = threading.local()
"""`_space.names` is the namespace of the script that this thread runs."""


class _Main(types.ModuleType):
    """`__main__` where ranks are threads: each sees the names of its own run of the script.

    So pickling finds the script's classes, and a spawned process finds the script, wherever it runs.
    """

    def __getattr__(self, name: str) -> Any:
        names = getattr(_space, "names", {})
        if name not in names:
            raise AttributeError(f"module '__main__' has no attribute {name!r}")
        return names[name]


def find_module(name: str) -> ModuleSpec:
    """What `python -m name` would run."""
    if name.endswith(".py"):
        raise UserError(f"-m takes a module, such as package.module; {name} is a file: leave out -m")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError) as error:
        raise UserError(f"there is no module {name} here: {error}") from None
    if spec is None or spec.origin is None or spec.loader is None:
        raise UserError(f"there is no module {name} that could be run; start in the folder that its package is in")
    return spec


def run_script(rank: Rank, argument: dict[str, Any]) -> None:
    """One rank's run of the script."""
    rank.draws = argument["timeline"]
    spec = find_module(argument["module"]) if argument["module"] else None
    path = Path(spec.origin or "") if spec else Path(argument["script"])
    sys.argv = [str(path), *argument["args"]]
    if spec is None and str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    code = compile(path.read_bytes(), str(path), "exec")
    names = {
        "__name__": "__main__",
        "__file__": str(path),
        "__package__": spec.parent if spec else None,
        "__spec__": spec,
        "__builtins__": __builtins__,
    }
    _space.names = names
    before = sys.modules["__main__"]
    if not isinstance(before, _Main):
        main = _Main("__main__")
        vars(main).update(__file__=str(path), __spec__=spec, __package__=names["__package__"])
        sys.modules["__main__"] = main
    try:
        exec(code, names)
    except SystemExit as ending:
        if ending.code not in (None, 0):
            raise
    rank.tell("script-ended", {}, b"")
