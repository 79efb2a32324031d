"""What a run is: a RunSpec, from flags, Python or a TOML file."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import random
import sys
import tomllib
import traceback
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from hocket import optim
from hocket.core.errors import UserError
from hocket.core.registry import convert, parse_options, unknown
from hocket.engines.catalogue import DEADLINE_S, Engine, engine
from hocket.measure.trace import DETAIL
from hocket.strategies import Strategy, strategy
from hocket.tasks import Task, task
from hocket.tasks.base import make_task

WORKERS = 2
"""How many workers, unless the strategy or the user says otherwise."""


@dataclass(frozen=True)
class RunSpec:
    """One training run. What is None takes the task's, the strategy's or the machine's default."""

    task: str
    strategy: str = "allreduce"
    engine: str | None = None
    workers: int | None = None
    epochs: int | None = None
    steps: int | None = None
    batch: int | None = None
    """Samples a step of each worker."""
    lr: float | None = None
    momentum: float | None = None
    optimizer: str | None = None
    warmup: float = 0.0
    """Epochs over which the learning rate rises to its full height."""
    lr_decay: float | None = None
    """What the learning rate is multiplied by after every epoch."""
    scale_lr: bool = False
    """Multiply the learning rate by the number of workers (linear scaling)."""
    seed: int = 0
    target: float | None = None
    """Stop when the test metric reaches this."""
    data: str | None = None
    """Where the task's data sets are; for a task on the user's own data, the file of training samples."""
    test_data: str | None = None
    """For such a task: the file of test samples."""
    device: str = "cpu"
    deadline: float = DEADLINE_S
    """Seconds that a rank may wait for another."""
    trace: int = DETAIL
    """Events that each rank logs one by one."""
    hosts: str = ""
    mpiexec: str = ""
    sim: dict[str, str] = field(default_factory=dict)
    """Options of the simulator."""

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], source: str = "") -> RunSpec:
        """A spec from what a TOML file, flags or key=value overrides gave; `source` is the file, for errors."""
        hints = typing.get_type_hints(cls)
        where = f"{source}: " if source else ""
        known = [f.name for f in dataclasses.fields(cls)]
        checked: dict[str, Any] = {}
        for key, value in values.items():
            if key not in known:
                raise UserError(f"{where}{unknown('setting', key, known)}")
            if key == "sim":
                if not isinstance(value, Mapping):
                    raise UserError(f'{where}sim must be a table, such as [sim] with compute = "2ms"')
                checked[key] = {k: str(v) for k, v in value.items()}
            elif value is not None:
                checked[key] = convert(value, hints[key], f"{where}{key}")
        if "task" not in checked:
            raise UserError(f"{where}no task is named; give one, such as 'hocket train digits'")
        return cls(**checked)

    def to_toml(self) -> str:
        """The spec as TOML. JSON's strings, numbers and booleans are TOML's too."""
        values = dataclasses.asdict(self)
        sim = values.pop("sim")
        lines = [f"{key} = {_toml(value)}" for key, value in values.items() if value not in (None, "")]
        if sim:
            lines += ["", "[sim]"] + [f"{key} = {_toml(value)}" for key, value in sim.items()]
        return "\n".join(lines) + "\n"

    def resolved(self, task: Task) -> RunSpec:
        """With every default filled in, so that the spec alone reproduces the run. Refuses what cannot run."""
        optimizer = self.optimizer or task.optimizer
        momentum = self.momentum
        if momentum is None:
            momentum = task.momentum if optim.takes_momentum(optimizer) else 0.0
        elif momentum and not optim.takes_momentum(optimizer):
            raise UserError(f"optimizer {optimizer} takes no momentum; leave --momentum out, or use --optimizer sgd")
        workers = self.workers
        if workers is None:
            workers = 1 if self.make_strategy().name == "serial" else WORKERS
        spec = dataclasses.replace(
            self,
            workers=workers,
            epochs=task.epochs if self.epochs is None and self.steps is None else self.epochs,
            batch=task.batch if self.batch is None else self.batch,
            lr=task.lr if self.lr is None else self.lr,
            lr_decay=task.lr_decay if self.lr_decay is None else self.lr_decay,
            momentum=momentum,
            optimizer=optimizer,
        )
        spec.check()
        return spec

    def check(self) -> None:
        for name in ("workers", "epochs", "steps", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} must be 1 or more, got {value}")
        if self.epochs is not None and self.steps is not None:
            raise UserError("give epochs or steps, not both")
        for name in ("lr", "momentum", "target", "deadline"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise UserError(f"{name} must be finite, got {value}")
        if self.lr is not None and self.lr <= 0:
            raise UserError(f"lr must be greater than 0, got {self.lr:g}")
        if self.lr_decay is not None and not 0 < self.lr_decay <= 1:
            raise UserError(f"lr_decay must be greater than 0 and at most 1, got {self.lr_decay:g}")
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise UserError(f"momentum must be at least 0 and less than 1, got {self.momentum:g}")
        if not (math.isfinite(self.warmup) and self.warmup >= 0):
            raise UserError(f"warmup must be 0 or more epochs, got {self.warmup:g}")
        if self.deadline <= 0:
            raise UserError(f"deadline must be greater than 0 seconds, got {self.deadline:g}")
        if not 0 <= self.seed < 2**40:
            raise UserError(f"seed must be 0 or more and less than 2**40, got {self.seed}")
        if self.trace < 0:
            raise UserError(f"trace must be 0 or more, got {self.trace}")
        if self.sim and self.engine is not None and self.engine.partition(":")[0] != "sim":
            raise UserError(f"--sim has no meaning on engine {self.engine}; add --engine sim")
        if self.optimizer is not None:
            optim.parse(self.optimizer)
        if self.workers is not None:
            self.make_strategy().check(self.workers)

    def make_strategy(self) -> Strategy:
        return strategy.make(self.strategy)

    def make_engine(self) -> Engine:
        """The engine, with the options that concern it."""
        assert self.engine is not None
        name, _, rest = self.engine.partition(":")
        cls = engine[name]
        chosen = parse_options(cls, f"engine {name}", rest)
        fields = {f.name for f in dataclasses.fields(typing.cast(Any, cls))}
        own = {"deadline": self.deadline, "hosts": self.hosts, "mpiexec": self.mpiexec, "seed": self.seed}
        own["workers"] = self.workers or 0
        given = {k: v for k, v in own.items() if k in fields and v != ""}
        if name == "sim":
            chosen |= parse_options(cls, "sim", ",".join(f"{k}={v}" for k, v in self.sim.items()))
        return cls(**(given | chosen))


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"there is no spec file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None


def load_task(name: str, seed: int, data: str | None, test_data: str | None = None) -> Task:
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
    if not path.is_file():
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
        with _seeded(seed):
            spec.loader.exec_module(module)
    except StopLoading:
        pass
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        sys.path.remove(folder)
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"cannot import {path}{_line(error, path)}: {what}") from error
    finally:
        loading = False
    return module


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
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
