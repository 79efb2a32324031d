"""Finding what a name stands for, in Hocket or in a user's own file, package or module."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import traceback
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from hocket.core.errors import UserError, named, said
from hocket.core.registry import Registry
from hocket.core.seeds import seeded
from hocket.strategies import Strategy, strategy
from hocket.tasks import Task, task
from hocket.tasks.base import make_task


def load_task(name: str, seed: int, data: str | None = None, test_data: str | None = None) -> Task:
    """The task that a name stands for: one of Hocket's, `path/to/file.py:task` or `package.module:task`."""
    place, attribute = split_task(name)
    if place:
        if data or test_data:
            raise UserError(f"the task in {place} brings its own data; leave --data and --test-data out")
        found = getattr(load_place(place, seed), attribute, None)
        if isinstance(found, Task):
            return found
        what = "is not a hocket.Task" if found is not None else "does not exist"
        raise UserError(f"{attribute} in {place} {what}; write there: {attribute} = hocket.Task(model=..., data=...)")
    if name.endswith(".py"):
        raise UserError(f"say which task of {name} to train: {name}:task")
    given = [Path(p).expanduser() if p else None for p in (data, test_data)]
    return make_task(task.make(name), seed, *given)


def split_task(name: str) -> tuple[str, str]:
    """The place and the name there of a task that is the user's; the place is empty for one of Hocket's."""
    found, rest = task.split(name)
    place, colon, attribute = found.rpartition(":")
    return (place, attribute) if colon and not rest else ("", "")


def absolute(text: str, registry: Registry[Any]) -> str:
    """The same text with the place of what is the user's own as it is found wherever the text is read again."""
    found, rest = registry.split(text)
    place, colon, name = found.rpartition(":")
    if not colon:
        return text
    return ":".join([_absolute(place), name, *filter(None, [rest])])


def _absolute(place: str) -> str:
    """A file by its full path, and a module as the file that it is, if that says which package it belongs to."""
    if place.endswith(".py"):
        return str(Path(place).resolve())
    path = _file_of(place)
    return str(path) if (module_of(path)[0] or path.stem) == place else place


def _find_strategy(place: str, name: str) -> type[Strategy]:
    """A strategy in a user's file or module, by the name that it is registered under or by its class's."""
    module = load_place(place, 0)
    own = (strategy[known] for known in strategy if known == name)
    for found in (getattr(module, name, None), *(cls for cls in own if cls.__module__ == module.__name__)):
        if isinstance(found, type) and issubclass(found, Strategy) and hasattr(found, "name"):
            return found
    raise UserError(f"{name} in {place} is no strategy; write @strategy({name!r}) above its class there")


strategy.find = _find_strategy


class StopLoading(BaseException):
    """Raised by `hocket.fit` while a task's file is being loaded: what stands above it is all that is needed."""


loading = False
"""Whether a user's file is being loaded for the task that it defines."""


def load_place(place: str, seed: int) -> ModuleType:
    """The module that a place stands for: a file, or a module by its dotted name."""
    if place.endswith(".py"):
        return load_file(Path(place), seed)
    return _loaded(place, _file_of(place), seed)


def load_file(path: Path, seed: int) -> ModuleType:
    """Import a user's file, as far as the first `hocket.fit` at its top level; one in a package as a part of it.

    Every rank's process does so, and what the file draws at random must be the same in all of them.
    """
    if not os.path.isfile(path):  # unlike Path.is_file, it takes names that no file can have
        raise UserError(f"there is no file {path}")
    path = path.resolve()
    name, root = module_of(path)
    _search(root, 0)
    _search(path.parent, len(sys.path))
    return _loaded(name or re.sub(r"\W", "_", f"hocket_user_{path.stem}"), path, seed)  # a dot would mean a package


def module_of(path: Path) -> tuple[str, Path]:
    """The dotted name of a file in a package, empty if it is in none, and the folder that the package lies in."""
    parts = [] if path.stem == "__init__" else [path.stem]
    folder = path.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return (".".join(parts) if folder != path.parent else ""), folder


def _search(folder: Path, at: int) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(at, str(folder))


def _file_of(module: str) -> Path:
    """The file of a module, which is looked for in the current folder too; nothing is imported for it."""
    _search(Path.cwd(), 0)
    importlib.invalidate_caches()
    first, *rest = module.split(".")
    spec, name = importlib.util.find_spec(first), first
    for part in rest:
        name = f"{name}.{part}"
        inside = spec.submodule_search_locations if spec else None
        spec = PathFinder.find_spec(name, inside) if inside is not None else None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        kinds = "a task or strategy of Hocket's, nor " if "." not in module else ""
        raise UserError(f"{module} is not {kinds}a module that can be found from {Path.cwd()}; see 'hocket list'")
    return Path(spec.origin).resolve()


def _loaded(name: str, path: Path, seed: int) -> ModuleType:
    """The module of this name, from this file; imported once, but for what is running as a script already."""
    global loading
    for known in ("__main__", name):
        if known in sys.modules and _is_from(sys.modules[known], path):
            return sys.modules[known]
    before = set(sys.modules)
    loading = True
    try:
        with seeded(seed):
            return _imported(name, path)
    except StopLoading:
        if name not in sys.modules:  # raised in a module that this one imports
            line = "calls hocket.fit while it is imported; put that under if __name__ == '__main__'"
            raise UserError(f"cannot import {path}: something there {line}") from None
        return sys.modules[name]
    except (Exception, SystemExit) as error:
        for new in set(sys.modules) - before:
            if new == name or name.startswith(f"{new}."):
                del sys.modules[new]
        what = " ".join((said(error) if isinstance(error, UserError) else named(error)).split())
        if "no known parent package" in what:
            what += "; put an __init__.py into its folder, or name it as a module, such as package.module:task"
        raise UserError(f"cannot import {path}{_line(error, path)}: {what}") from error
    finally:
        loading = False


def _is_from(module: ModuleType, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return bool(file) and os.path.realpath(str(file)) == str(path)


def _imported(name: str, path: Path) -> ModuleType:
    """By hand, as the import system would forget a module that does not come to its end."""
    parent, _, own = name.rpartition(".")
    package = importlib.import_module(parent) if parent else None
    if parent and name in sys.modules:
        if _is_from(sys.modules[name], path):  # the package imports it
            return sys.modules[name]
        where = getattr(sys.modules[name], "__file__", None)
        raise UserError(f"another module called {name} is in use ({where}); rename one of them")
    if package is not None and str(path.parent) not in map(os.path.realpath, package.__path__):
        where = ", ".join(package.__path__)
        raise UserError(f"another package called {parent} is in use ({where}); rename one of them")
    is_package = path.stem == "__init__"
    inside = [str(path.parent)] if is_package else None
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=inside)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    if package is not None:
        setattr(package, own, module)
    spec.loader.exec_module(module)
    return module


def _line(error: BaseException, path: Path) -> str:
    """Where in the user's file an error arose."""
    if isinstance(error, SyntaxError):
        return f", line {error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f", line {frames[-1].lineno}" if frames else ""


def find_name(wanted: Task) -> str | None:
    """`file.py:name` of a task that stands at the top level of a loaded module, for fresh processes to find it."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not isinstance(module, ModuleType) or not file or not str(file).endswith(".py"):
            continue
        for name, value in vars(module).items():
            if value is wanted:
                return f"{_place_of(module, Path(os.path.abspath(file)))}:{name}"
    return None


def _place_of(module: ModuleType, path: Path) -> str:
    """The file of a module; its name where a package without __init__.py would not be known by the file."""
    dotted = getattr(module.__spec__, "name", "")
    is_below_here = path == Path.cwd().joinpath(*dotted.split(".")).with_suffix(".py")
    return dotted if "." in dotted and is_below_here and not module_of(path)[0] else str(path)
