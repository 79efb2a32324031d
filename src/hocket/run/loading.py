"""Finding the task that a name stands for, in Hocket or in a user's file."""

from __future__ import annotations

import importlib.util
import os
import random
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from hocket.core.errors import UserError
from hocket.tasks import Task, task
from hocket.tasks.base import make_task


def load_task(name: str, seed: int, data: str | None = None, test_data: str | None = None) -> Task:
    """The task that a name stands for: one that ships with Hocket, or `path/to/file.py:task`."""
    path, colon, attribute = name.rpartition(":")
    if colon and path.endswith(".py"):
        if data or test_data:
            raise UserError(f"the task in {path} brings its own data; leave --data and --test-data out")
        found = getattr(load_file(Path(path), seed), attribute, None)
        if isinstance(found, Task):
            return found
        what = "is not a hocket.Task" if found is not None else "does not exist"
        raise UserError(f"{attribute} in {path} {what}; write there: {attribute} = hocket.Task(model=..., data=...)")
    if name.endswith(".py"):
        raise UserError(f"say which task of {name} to train: {name}:task")
    given = [Path(p).expanduser() if p else None for p in (data, test_data)]
    return make_task(task.make(name), seed, *given)


class StopLoading(BaseException):
    """Raised by `hocket.fit` while a task's file is being loaded: what stands above it is all that is needed."""


loading = False
"""Whether a user's file is being loaded for the task that it defines."""


def load_file(path: Path, seed: int) -> ModuleType:
    """Import a user's file, as far as the first `hocket.fit` at its top level.

    Every rank's process does so, and what the file draws at random must be the same in all of them.
    """
    global loading
    if not os.path.isfile(path):  # unlike Path.is_file, it takes names that no file can have
        raise UserError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"hocket_user_{path.stem}", path.resolve())
    assert spec is not None and spec.loader is not None
    if spec.name in sys.modules and getattr(sys.modules[spec.name], "__file__", None) == str(path.resolve()):
        return sys.modules[spec.name]
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    sys.modules[spec.name] = module
    loading = True
    try:
        with seeded(seed):
            spec.loader.exec_module(module)
    except StopLoading:
        pass
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        sys.path.remove(folder)
        named = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        what = " ".join(f"{named}{error}".split())
        raise UserError(f"cannot import {path}{_line(error, path)}: {what}") from error
    finally:
        loading = False
    return module


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers that follow from `seed`; the caller's generators are given back as they were."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def _line(error: BaseException, path: Path) -> str:
    """Where in the user's file an error arose."""
    if isinstance(error, SyntaxError):
        return f", line {error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path.resolve())]
    return f", line {frames[-1].lineno}" if frames else ""


def find_name(wanted: Task) -> str | None:
    """`file.py:name` of a task that stands at the top level of a loaded module, for fresh processes to find it."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not isinstance(module, ModuleType) or not file or not str(file).endswith(".py"):
            continue
        for name, value in vars(module).items():
            if value is wanted:
                return f"{os.path.abspath(file)}:{name}"
    return None
