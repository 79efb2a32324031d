"""What is trained: a model, its data, loss, metric and target."""

from __future__ import annotations

import copy
import inspect
import math
import numbers
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, default_collate

from hocket.core.errors import UserError, shown
from hocket.core.modules import check_module
from hocket.core.registry import Registry
from hocket.core.seeds import seeded
from hocket.optim.schedules import Own

if TYPE_CHECKING:
    from hocket.kernels.models.family import Kernel


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """The share of samples whose largest output is the target class."""
    return (output.argmax(-1) == target).float().mean()


Samples = tuple[Tensor, Tensor] | Dataset[Any]
"""Inputs and targets as two tensors (fast), or any map-style dataset of (input, target)."""


Metric = Callable[[Any, Any], Tensor | float]


@dataclass(frozen=True)
class Progress:
    """Where a worker is, for a function of the task's that is called as training goes."""

    worker: int
    workers: int
    step: int
    """Steps of this worker so far."""
    epoch: float
    """Passes over the data so far."""
    seconds: float
    """Of training."""
    lr: float
    loss: float
    """Of the last batch (`on_step`), or since the model was last judged (`on_epoch`)."""
    model: nn.Module
    """This worker's own, as it is."""
    judged: Mapping[str, float | None]
    """The last point of the learning curve that this worker knows of; empty where it knows of none."""


@dataclass(frozen=True)
class Task:
    """A model, its data, loss and metric, with the settings it trains well with.

    `model` is a module or a function that makes one; `data` is (train, test) or a function that gives
    them. `metric` is a mean over samples; larger is better unless `lower_is_better`. Of several `metrics` the first is
    the one that counts.
    """

    model: nn.Module | Callable[[], nn.Module]
    data: tuple[Samples, Samples] | Callable[[], tuple[Samples, Samples]]
    loss: Callable[[Any, Any], Tensor] = F.cross_entropy
    metric: Callable[[Any, Any], Tensor | float] = accuracy
    metric_name: str = "accuracy"
    lower_is_better: bool = False
    metric_is_share: bool | None = None
    """Whether the metric is the share of samples, from 0 to 1, whose class was told right, as `accuracy` is."""
    target: float | None = None
    """The metric at which the task counts as learnt; `time_to_target` is measured against it."""
    epochs: int = 10
    batch: int = 32
    lr: float = 0.1
    lr_decay: float = 1.0
    """What the learning rate is multiplied by after every epoch."""
    lr_falls: bool = False
    """Whether the rate falls linearly, to 0 at the end of the run."""
    momentum: float = 0.0
    optimizer: str = "sgd"
    schedule: str | Own = ""
    """One of torch.optim.lr_scheduler, by name and options, or a function that makes one, if any."""
    metrics: Mapping[str, Metric] | None = None
    """Several metrics by name, in place of one."""
    evaluate: Callable[[nn.Module, Any], Mapping[str, float]] | None = None
    """What is no mean over samples: called with the model and all samples, gives values by name, `metric_name` among
    them."""
    validation: float | Samples | Callable[[], Samples] | None = None
    """Samples that are judged while training goes on, or the share of the training samples that is kept back for it;
    the test samples are then judged once, in the end."""
    on_step: Callable[[Progress], object] | None = None
    """Called by every worker after each of its steps."""
    on_epoch: Callable[[Progress], object] | None = None
    """Called by every worker after each epoch."""
    strategy: str = "allreduce"
    """How workers agree where nobody says otherwise."""

    glance: ClassVar[int] = 2048
    """Samples of a first look at the training loss."""
    rehearsed: ClassVar[bool] = True
    """Whether a rate that is too high for many workers is looked for before they start."""

    def __post_init__(self) -> None:
        self._check_callables()
        self._check_measures()
        self._check_number("epochs", int, "1 or more", lambda v: v >= 1)
        self._check_number("batch", int, "1 or more", lambda v: v >= 1)
        self._check_number("lr", float, "greater than 0", lambda v: v > 0)
        self._check_number("lr_decay", float, "greater than 0 and at most 1", lambda v: 0 < v <= 1)
        self._check_number("momentum", float, "at least 0 and less than 1", lambda v: 0 <= v < 1)
        if self.metric_is_share is None:
            object.__setattr__(self, "metric_is_share", self.measures.get(self.metric_name) is accuracy)
        if self.target is not None:
            self._check_number("target", float, "finite, or None", lambda v: True)
            self.check_target(self.target)

    def _check_callables(self) -> None:
        if not callable(self.model):
            raise UserError(f"Task.model must be a module or a function that makes one; got {shown(self.model)}")
        for name in ("loss", "metric"):
            if not callable(value := getattr(self, name)):
                raise UserError(f"Task.{name} must be a function of (output, target); got {shown(value)}")
        for name in ("evaluate", "on_step", "on_epoch"):
            if (value := getattr(self, name)) is not None and not callable(value):
                raise UserError(f"Task.{name} must be a function, or None; got {shown(value)}")
        for name in ("metric_name", "optimizer", "strategy", "schedule"):
            needed = name != "schedule"
            value = getattr(self, name)
            if name == "schedule" and callable(value):
                continue
            if not isinstance(value, str) or not value.isprintable() or (needed and not value.strip()):
                raise UserError(f"Task.{name} must be text on one line; got {shown(value)}")
        if self.metric_name == "loss":
            raise UserError("Task.metric_name must not be 'loss': test_loss is the loss itself; choose another name")
        for name in ("lower_is_better", "lr_falls"):
            if not isinstance(value := getattr(self, name), bool):
                raise UserError(f"Task.{name} must be True or False; got {shown(value)}")
        if self.metric_is_share not in (True, False, None):
            raise UserError(f"Task.metric_is_share must be True or False; got {shown(self.metric_is_share)}")

    def _check_measures(self) -> None:
        """Settle what is measured, and which of it counts."""
        share: Any = self.validation
        if isinstance(share, (str, bool)) or (isinstance(share, (int, float)) and not 0 <= share < 1):
            raise UserError(f"Task.validation must be samples, or a share from 0 to below 1; got {shown(share)}")
        if self.metrics is None:
            return
        names = self.metrics if isinstance(self.metrics, Mapping) else {}
        if not names or not all(isinstance(n, str) and n.strip() and callable(m) for n, m in names.items()):
            raise UserError(f"Task.metrics must be functions by name, one or more; got {shown(self.metrics)}")
        if "loss" in names or not all(name.isprintable() for name in names):
            raise UserError("Task.metrics must have names on one line, and none may be 'loss', which is there anyway")
        if self.metric is not accuracy or self.metric_name not in ("accuracy", first := next(iter(names))):
            raise UserError("Task.metrics takes the place of metric and metric_name; its first counts: leave those out")
        object.__setattr__(self, "metric_name", first)

    @property
    def own_schedule(self) -> Own | None:
        return self.schedule if callable(self.schedule) else None

    @property
    def measures(self) -> dict[str, Metric]:
        """What is taken as a mean over samples."""
        if self.metrics is not None:
            return dict(self.metrics)
        return {} if self.evaluate is not None else {self.metric_name: self.metric}

    def _check_number(self, name: str, kind: type[int | float], range_: str, fits: Callable[[Any], bool]) -> None:
        """Refuse what is no number of this kind or out of range; numpy's numbers become Python's."""
        value: Any = getattr(self, name)
        wanted: type[Any] = numbers.Integral if kind is int else numbers.Real
        if isinstance(value, bool) or not isinstance(value, wanted) or not (abs(value) < 2**63) or not fits(value):
            noun = "a whole number" if kind is int else "a number"
            raise UserError(f"Task.{name} must be {noun}, {range_}; got {shown(value)}")
        object.__setattr__(self, name, kind(value))

    def check_target(self, target: float) -> None:
        """Refuse one that the metric can never have."""
        if self.metric_is_share and not 0 <= target <= 1:
            raise UserError(f"target must be from 0 to 1, as {self.metric_name} is a share; got {target:g}")

    def build_model(self, seed: int) -> nn.Module:
        """A fresh model: the same one for the same seed."""
        if isinstance(self.model, nn.Module):
            check_module(self.model)  # before the copy, which would untie what is tied
            try:
                return copy.deepcopy(self.model)
            except Exception as error:
                why = shown(error)
                raise UserError(f"Task.model cannot be copied ({why}); give a function that makes it") from error
        with seeded(seed):
            model = self.model()
        if not isinstance(model, nn.Module):
            raise UserError(f"Task.model must give a torch.nn.Module; it gave a {type(model).__name__}")
        return model

    def load(self) -> tuple[SampleSet, SampleSet]:
        """The training and the test samples."""
        data = self.data() if callable(self.data) else self.data
        if not (isinstance(data, tuple) and len(data) == 2):
            raise UserError("Task.data must be (train, test), or a function that gives them")
        return SampleSet(data[0], "train"), SampleSet(data[1], "test")

    def is_better(self, value: float | None, than: float | None) -> bool:
        """Whether one value of the metric beats another; what is none, or not finite, beats nothing."""
        if value is None or not math.isfinite(value):
            return False
        return than is None or (value < than if self.lower_is_better else value > than)

    # For tasks of Hocket's own

    def notes(self) -> list[str]:
        """What a user should know before the run."""
        return []

    def words_a_sample(self) -> float | None:
        """Where a sample is a piece of a text: the words that it stands for, all that were read counted."""
        return None

    def write(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Write the trained model in forms of the task's own, if there are any, into a folder of their own."""


class SampleSet:
    """Samples that are taken by index, many at a time."""

    def __init__(self, samples: Any, name: str) -> None:
        self._tensors: tuple[Tensor, Tensor] | None = None
        self._dataset: Any = None
        self._elsewhere: dict[torch.device, SampleSet] = {}
        if isinstance(samples, tuple):
            if len(samples) != 2 or not all(isinstance(t, Tensor) and t.dim() for t in samples):
                raise UserError(f"Task.data: {name} must be a Dataset or two tensors (inputs, targets)")
            if len(samples[0]) != len(samples[1]):
                raise UserError(f"Task.data: {name} has {len(samples[0])} inputs but {len(samples[1])} targets")
            self._tensors = samples
        elif isinstance(samples, Tensor):
            raise UserError(f"Task.data: {name} is one tensor; write data=((inputs, targets), (test inputs, targets))")
        elif hasattr(samples, "__getitem__") and hasattr(samples, "__len__"):
            self._dataset = samples
        else:
            raise UserError(f"Task.data: {name} must have a length and take an index (a map-style Dataset)")
        if len(self) == 0:
            raise UserError(f"Task.data: {name} has no samples")

    def __len__(self) -> int:
        return len(self._tensors[0]) if self._tensors is not None else len(self._dataset)

    @property
    def samples(self) -> Samples:
        """What the task gave."""
        return self._dataset if self._tensors is None else self._tensors

    def take(self, index: Tensor) -> tuple[Any, Any]:
        """Inputs and targets of these samples; a dataset may bring its own `take` in place of one by one."""
        if self._tensors is not None:
            inputs, targets = self._tensors
            index = index.to(inputs.device)
            return inputs.index_select(0, index), targets.index_select(0, index)
        if hasattr(self._dataset, "take"):
            inputs, targets = self._dataset.take(index)
            return inputs, targets
        samples = [self._dataset[i] for i in index.tolist()]
        try:
            inputs, targets = default_collate(samples)
        except (RuntimeError, TypeError, ValueError) as error:
            line = " ".join(str(error).split())
            raise UserError(f"Task.data: these samples make no batch, give all one shape and type: {line}") from None
        return inputs, targets

    @property
    def is_read_one_by_one(self) -> bool:
        """Whether samples are taken one at a time, so that other processes could take them meanwhile."""
        return self._tensors is None and not hasattr(self._dataset, "take")

    def part(self, index: Tensor) -> SampleSet:
        """These samples alone."""
        if self._tensors is not None:
            return SampleSet(self.take(index), "samples")
        return SampleSet(_Part(self._dataset, index), "samples")

    def to(self, device: torch.device) -> SampleSet:
        """The same samples; tensors are moved to `device` as a whole, and once for all ranks of a process."""
        if self._tensors is None or all(t.device == device for t in self._tensors):
            return self
        if device not in self._elsewhere:
            inputs, targets = self._tensors
            self._elsewhere[device] = SampleSet((inputs.to(device), targets.to(device)), "samples")
        return self._elsewhere[device]


class _Part:
    """Some samples of a dataset."""

    def __init__(self, dataset: Any, index: Tensor) -> None:
        self._dataset, self._index = dataset, index
        if hasattr(dataset, "take"):
            self.take = lambda chosen: dataset.take(index[chosen])

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, i: int) -> Any:
        return self._dataset[int(self._index[i])]


def most_frequent(samples: SampleSet) -> float | None:
    """The share of the most frequent class; None where the targets are not one number a sample, or not at hand."""
    data = samples.samples
    if not (isinstance(data, tuple) or hasattr(data, "take")):  # one by one would take long
        return None
    _, targets = samples.take(torch.arange(len(samples)))
    if not isinstance(targets, Tensor) or targets.dim() != 1:
        return None
    return Counter(targets.tolist()).most_common(1)[0][1] / len(samples)


class Recipe(Protocol):
    """A task that ships with Hocket. A frozen dataclass whose fields are its options."""

    name: ClassVar[str]

    def make(self, seed: int, data: Path | None) -> Task:
        """The task; `data` is where the user keeps data sets, if they said."""


def refuse_data(name: str, data: Path | None) -> None:
    """For the recipe of a task that needs no files."""
    if data is not None:
        raise UserError(f"task {name} brings its own data; leave --data out")


def make_task(recipe: Recipe, seed: int, data: Path | None, test_data: Path | None = None) -> Task:
    """The recipe's task on the user's data; a recipe that takes a file of test samples has an argument for it."""
    if test_data is None:
        return recipe.make(seed, data)
    if "test_data" not in inspect.signature(recipe.make).parameters:
        raise UserError(f"task {recipe.name} has test samples of its own; leave --test-data out")
    return recipe.make(seed, data, test_data)  # type: ignore[call-arg]


class BringsKernel(nn.Module, ABC):
    """A model that brings its training in compiled form. A base class, since users' modules have a `kernel` too."""

    @abstractmethod
    def kernel(self, loss: Callable[..., Tensor], samples: Any) -> Kernel | None:
        """The compiled gradient with this loss on these samples; None where it has none for them."""


def compiled(model: nn.Module, loss: Callable[[Any, Any], Tensor], train: SampleSet) -> Kernel | None:
    """The compiled gradient of a model, if there is one: the model brings it, or it is a perceptron."""
    if isinstance(model, BringsKernel):
        return model.kernel(loss, train.samples)
    from hocket.kernels.models.dense import DenseKernel  # Numba takes half a second to import

    return DenseKernel.recognise(model, loss, train.samples)


task: Registry[Recipe] = Registry("task", "tasks")
