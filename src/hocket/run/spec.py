"""What a run is: a RunSpec, from flags, Python or a TOML file. Its fields are the one list of all settings."""

from __future__ import annotations

import dataclasses
import json
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import Field, dataclass, field
from pathlib import Path
from typing import Any, Literal

from hocket.core.deadline import DEADLINE_S
from hocket.core.errors import UserError
from hocket.core.registry import convert, unknown
from hocket.measure.trace import DETAIL

Command = Literal["train", "compare", "tune", "launch"]
TRAINING: tuple[Command, ...] = ("train", "compare", "tune")
ONE: tuple[Command, ...] = ("train", "tune")
"""Those that are about one strategy with one number of workers."""
ANYWHERE: tuple[Command, ...] = (*TRAINING, "launch")


def _about(
    help: str,
    *,
    short: str = "",
    commands: tuple[Command, ...] = TRAINING,
    fixed: bool = False,
    number: bool = False,
) -> dict[str, Any]:
    """What is said of a setting: its line in the command's help, its short flag, the commands that take it.

    A `fixed` one is settled when a run begins, and stays when it is resumed. A text may also be a plain `number`.
    """
    return dict(help=help, short=short, commands=commands, fixed=fixed, number=number)


def setting(default: Any, help: str, **about: Any) -> Any:
    return field(default=default, metadata=_about(help, **about))


@dataclass(frozen=True)
class RunSpec:
    """One training run. What is None takes the task's, the strategy's or the machine's default."""

    task: str = field(metadata=_about("", commands=(), fixed=True))
    strategy: str = setting(
        "",
        "How workers agree, such as local-sgd:every=16. [the task's: allreduce, word2vec: hogwild]",
        short="-s",
        commands=ONE,
    )
    workers: int | None = setting(None, "Number of workers. [2]", short="-n", commands=(*ONE, "launch"))
    layout: str = setting("", "How a model is split over ranks, such as tensor=2 or pipeline=2,data=2. [not at all]")
    engine: str | None = setting(None, "mpi, torch, threads, sim or fleet. [mpi where it can start]", commands=ANYWHERE)
    driver: Literal["auto", "compiled", "pytorch"] = setting(
        "auto", "Who takes the steps: compiled workers or pytorch. [shared memory compiled where it can be]", fixed=True
    )
    compress: str = setting(
        "none", "How what is sent shrinks: topk:0.01, qsgd:bits=4, topk:0.01+qsgd:bits=8 ... [none]", fixed=True
    )
    epochs: int | None = setting(None, "Passes over the data. [the task's]")
    steps: int | None = setting(None, "Steps of each worker, in place of epochs.")
    batch: int | None = setting(None, "Samples a step of each worker. [the task's]", fixed=True)
    lr: float | None = setting(None, "Learning rate. [the task's, or the optimizer's if that is not the task's]")
    momentum: float | None = setting(None, "Momentum. [the task's, or the optimizer's]")
    optimizer: str | None = setting(None, "sgd, adam, adamw:weight_decay=0.1 ... [the task's]", fixed=True)
    warmup: float = setting(0.0, "Epochs over which the learning rate rises to its full height. [0]")
    scale_lr: bool = setting(False, "Multiply the learning rate by the number of workers.")
    lr_decay: float | None = setting(None, "What the learning rate is multiplied by after every epoch.")
    schedule: str | None = setting(
        None, "One of torch.optim.lr_scheduler: cosine-annealing, step:step_size=3,per=epoch ... [the task's]"
    )
    clip: float = setting(0.0, "Shorten a gradient that is longer than this; see docs/own-model.md. [0: none]")
    accumulate: int = setting(1, "Batches whose gradients a worker adds up for one step. [1]", fixed=True)
    autocast: Literal["none", "bf16"] = setting("none", "Compute in bf16 where torch.autocast does. [none]", fixed=True)
    loaders: int = setting(0, "Processes beside each worker that take samples from a Dataset for it. [0]")
    seed: int = setting(0, "Seed of data order and initial weights. [0]", fixed=True)
    target: float | None = setting(None, "Stop when the metric reaches this, on validation samples if there are any.")
    validation: float | None = setting(
        None, "Share of the training samples that is kept back, to be judged in place of the test samples.", fixed=True
    )
    evaluate_every: float | None = setting(
        None, "Epochs between two points of the learning curve; 0.1 is ten an epoch. [1; compare: 0.2]", fixed=True
    )
    own_metrics: bool = setting(False, "In the end, also judge each worker's own replica.")
    train_metrics: bool = setting(False, "In the end, also judge the model on all training samples.")
    data: str | None = setting(
        None, "Folder with data sets, or a file of samples (logistic, svm, factorization).", fixed=True
    )
    test_data: str | None = setting(None, "File of test samples. [a fifth of the file --data]", fixed=True)
    device: str = setting("cpu", "cpu or cuda. [cpu]")
    deadline: float = setting(DEADLINE_S, "Seconds that a rank may wait for another. [60]", commands=ANYWHERE)
    checkpoint_every: str = setting(
        "", "Epochs (2) or time (10min) between checkpoints, which 'hocket resume' goes on from. [none]", number=True
    )
    sim: dict[str, str] = field(
        default_factory=dict,
        metadata=_about("Simulator: compute=2ms, latency=50us, bandwidth=10Gbit, stragglers=1x3.", commands=ANYWHERE),
    )
    hosts: str = setting("", "Machines for the engine mpi, such as a:4,b:4.", commands=ANYWHERE)
    mpiexec: str = setting("", "The MPI launcher. [the one installed with Hocket]", commands=ANYWHERE)
    bind: Literal["auto", "none", "core"] = setting(
        "auto", "Tie each rank to a core: auto, none or core. [auto: if enough are idle]", commands=ANYWHERE
    )
    trace: int = setting(DETAIL, "Events that each rank logs one by one. [10000]")
    timeline: bool = setting(False, "Draw what each rank did when: timeline.json, for Perfetto.", commands=ANYWHERE)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], source: str = "") -> RunSpec:
        """A spec from what a TOML file, flags or key=value overrides gave; `source` is the file, for errors."""
        where = f"{source}: " if source else ""
        known = settings()
        checked: dict[str, Any] = {}
        for key, value in values.items():
            if key not in known:
                raise UserError(f"{where}{unknown('setting', key, known)}")
            if value is not None:
                checked[key] = _converted(known[key], value, f"{where}{key}")
        if "task" not in checked:
            raise UserError(f"{where}no task is named; give one, such as 'hocket train digits'")
        return cls(**checked)

    def to_toml(self) -> str:
        """The spec as TOML. JSON's strings, numbers and booleans are TOML's too."""
        values = dataclasses.asdict(self)
        tables = {key: values.pop(key) for key, value in list(values.items()) if isinstance(value, dict)}
        lines = [f"{key} = {_toml(value)}" for key, value in values.items() if value not in (None, "")]
        for name, table in tables.items():
            if table:
                lines += ["", f"[{name}]"] + [f"{key} = {_toml(value)}" for key, value in table.items()]
        return "\n".join(lines) + "\n"


def settings(command: Command | None = None) -> dict[str, Field[Any]]:
    """The settings by name: all, or those that a command takes as flags."""
    return {f.name: f for f in dataclasses.fields(RunSpec) if command is None or command in f.metadata["commands"]}


def override(values: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Later settings win; steps and epochs stand for the same thing."""
    for key, other in (("steps", "epochs"), ("epochs", "steps")):
        if new.get(key) not in (None, "none") and other not in new:
            values.pop(other, None)
    values |= new


def type_of(declared: Field[Any]) -> Any:
    return typing.get_type_hints(RunSpec)[declared.name]


def _converted(declared: Field[Any], value: Any, what: str) -> Any:
    """`value` as the setting's type; refuses what does not fit."""
    if typing.get_origin(type_of(declared)) is dict:
        if not isinstance(value, Mapping):
            raise UserError(f'{what} must be a table, such as [sim] with compute = "2ms"')
        return {k: _text(str(v), f"{what}.{k}") for k, v in value.items()}
    if isinstance(value, Path) or (declared.metadata["number"] and type(value) in (int, float)):
        value = str(value)
    found = convert(value, type_of(declared), what)
    return _text(found, what) if isinstance(found, str) else found


def _text(value: str, what: str) -> str:
    """Text that can be written to a file and used as a path."""
    if "\0" in value or any(0xD800 <= ord(c) < 0xE000 for c in value):
        raise UserError(f"{what} must be UTF-8 text without zero bytes; got {value!r}")
    return value


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no spec file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    except (ValueError, RecursionError) as error:  # huge numbers and deep tables are plain ones
        raise UserError(f"{path} is not valid TOML: {str(error).partition(';')[0]}") from None
