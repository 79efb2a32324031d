"""Two classes of sparse rows, parted by a plane: logistic regression and the linear support vector machine."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from hocket.core.errors import UserError
from hocket.tasks import svmlight
from hocket.tasks.base import BringsKernel, Task, task
from hocket.tasks.footprint import check_fits
from hocket.tasks.lent import Array, lent
from hocket.tasks.svmlight import Table

if TYPE_CHECKING:
    from hocket.kernels.models.family import Kernel

HELD_OUT = 0.2
EPOCHS, BATCH, LR_DECAY = 15, 16, 0.75

COLUMN_BYTES = 44
"""What a run with one worker takes at its peak for each column: weight, gradient, count of rows, and their copies."""

# The generated set: texts of words, of which some are frequent and most are rare.
ROWS, WORDS, WORDS_A_ROW = 20_000, 500, 30


def logistic_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """The mean of log(1 + exp(-margin)); targets are -1 and 1."""
    return F.softplus(-scores * targets).mean()


def hinge_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """The mean of what each margin lacks to 1; targets are -1 and 1."""
    return (1 - scores * targets).clamp(min=0).mean()


def sign_accuracy(scores: Tensor, targets: Tensor) -> Tensor:
    """The share of samples on the right side of the plane."""
    return ((scores > 0) == (targets > 0)).float().mean()


class _Decayed(torch.autograd.Function):
    """The values themselves; going back, `strength * values` is added to their gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, strength: Tensor) -> Tensor:
        ctx.save_for_backward(values, strength)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        values, strength = ctx.saved_tensors
        return gradients[0] + strength * values, None


def decayed(values: Tensor, strength: Tensor) -> Tensor:
    """L2 regularisation of just these values, which leaves the loss as it is."""
    out: Tensor = _Decayed.apply(values, strength)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True)
class SparseBatch:
    """Some sparse rows: element k, of this row and column, has this value."""

    rows: Tensor
    columns: Tensor
    values: Tensor
    size: int

    def __len__(self) -> int:
        return self.size

    def to(self, device: torch.device) -> SparseBatch:
        return SparseBatch(self.rows.to(device), self.columns.to(device), self.values.to(device), self.size)


class SparseRows(Dataset[tuple[SparseBatch, Tensor]]):
    """Sparse rows with targets -1 and 1, in compressed form."""

    def __init__(self, table: Table, targets: np.ndarray[Any, np.dtype[np.float32]], features: int) -> None:
        self.table, self.targets, self.features = table, targets, features

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> tuple[SparseBatch, Tensor]:
        return self.take(torch.tensor([index]))

    def take(self, index: Tensor) -> tuple[SparseBatch, Tensor]:
        """These rows and their targets."""
        chosen = index.numpy()
        begin, end = self.table.pointers[chosen], self.table.pointers[chosen + 1]
        rows = np.repeat(np.arange(len(chosen)), end - begin)
        elements = np.arange(len(rows)) + np.repeat(begin - np.cumsum(end - begin) + (end - begin), end - begin)
        batch = SparseBatch(
            torch.from_numpy(rows),
            torch.from_numpy(self.table.columns[elements].astype(np.int64)),
            torch.from_numpy(self.table.values[elements]),
            len(chosen),
        )
        return batch, torch.from_numpy(self.targets[chosen])


class SparseLinear(BringsKernel):
    """A weight for each column, and a bias; training penalises the weights of the columns that a row has.

    The penalty of weight w_j in a row is l2 w_j^2 / (2 d_j), where d_j training rows have column j (HOGWILD!, Niu et
    al. 2011): it touches no weight outside the row.
    """

    rows_with: Tensor

    def __init__(self, rows_with: Tensor, l2: float) -> None:
        super().__init__()
        self.l2 = l2
        self.weight = nn.Parameter(torch.zeros(len(rows_with)))
        self.bias = nn.Parameter(torch.zeros(1))
        self.register_buffer("rows_with", rows_with, persistent=False)

    def forward(self, batch: SparseBatch) -> Tensor:
        weights = self.weight[batch.columns]
        if self.training and self.l2:
            weights = decayed(weights, self.l2 / len(batch) / self.rows_with[batch.columns])
        scores = self.bias.expand(len(batch))
        return scores.index_add(0, batch.rows, weights * batch.values)

    def kernel(self, loss: Callable[..., Tensor], samples: Any) -> Kernel | None:
        if loss not in (logistic_loss, hinge_loss) or not isinstance(samples, SparseRows):
            return None
        from hocket.kernels.models.sparse import SparseKernel  # Numba takes half a second to import

        table, rows_with = samples.table, self.rows_with.numpy()
        hinge = loss is hinge_loss
        return SparseKernel(
            table.pointers, table.columns, table.values, samples.targets, rows_with, float(self.l2), hinge
        )


@dataclass(frozen=True)
class _Linear:
    name: ClassVar[str]
    l2: float = 1.0
    """Strength of the penalty on the weights, for the training rows together."""
    scale: bool = True
    """Divide all values by the root mean square length of the training rows, so that one learning rate suits all."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.l2) and self.l2 >= 0):
            raise UserError(f"task {self.name}: l2 must be 0 or more; got {self.l2}")

    def _task(self, seed: int, data: Path | None, test_data: Path | None, **settings: Any) -> Task:
        if data is None and test_data is not None:
            raise UserError(f"task {self.name}: --test-data goes with --data; name the training file too")
        samples = functools.cache(functools.partial(load, seed, data, test_data, self.scale))

        def model() -> SparseLinear:
            train = samples()[0]
            rows_with = np.bincount(train.table.columns, minlength=train.features)
            return SparseLinear(torch.from_numpy(rows_with), self.l2)

        return Task(
            model,
            samples,
            metric=sign_accuracy,
            metric_is_share=True,
            target=0.92 if data is None else None,
            epochs=EPOCHS,
            batch=BATCH,
            lr_decay=LR_DECAY,
            **settings,
        )


@task("logistic")
@dataclass(frozen=True)
class Logistic(_Linear):
    """Logistic regression on sparse rows: a svmlight file (--data, --test-data), or 20,000 made-up texts."""

    def make(self, seed: int, data: Path | None, test_data: Path | None = None) -> Task:
        return self._task(seed, data, test_data, loss=logistic_loss, lr=5.0)


@task("svm")
@dataclass(frozen=True)
class Svm(_Linear):
    """Linear support vector machine on sparse rows: a svmlight file (--data, --test-data), or 20,000 made-up texts."""

    def make(self, seed: int, data: Path | None, test_data: Path | None = None) -> Task:
        return self._task(seed, data, test_data, loss=hinge_loss, lr=2.0)


def load(seed: int, data: Path | None, test_data: Path | None, scale: bool) -> tuple[SparseRows, SparseRows]:
    """(train, test)."""
    read = functools.partial(decode, seed, data, test_data, scale)
    features, *arrays = lent([data, test_data], ["rows", seed, scale], read)
    tables = Table(*arrays[:4]), Table(*arrays[4:])
    train, test = (SparseRows(table, table.labels, int(features)) for table in tables)
    return train, test


def decode(seed: int, data: Path | None, test_data: Path | None, scale: bool) -> list[Array]:
    """How many columns there are, and the training and the test table, with labels -1 and 1."""
    train = svmlight.read(data) if data is not None else made_up_texts(seed)
    classes = _classes(train, data)
    if test_data is not None:
        test = svmlight.read(test_data)
        if strange := sorted(set(test.labels.tolist()) - set(classes)):
            raise UserError(f"{test_data} has the label {strange[0]:g}, which {data} does not have")
    else:
        order = np.random.default_rng(seed).permutation(len(train))
        held_out = int(HELD_OUT * len(train))
        if not held_out:
            raise UserError(f"{data} has only {len(train)} rows, too few to hold some out; pass --test-data FILE too")
        train, test = select(train, order[held_out:]), select(train, order[:held_out])
    features = int(train.columns.max(initial=0)) + 1
    needed = f"{data}: a weight for every column up to {features - 1}"
    check_fits(COLUMN_BYTES * features, needed, "number the columns without gaps")
    length = math.sqrt(float(np.square(train.values, dtype=np.float64).sum()) / len(train)) if scale else 1.0
    parts = [_prepared(table, classes, features, length or 1.0) for table in (train, test)]
    return [np.array(features), *parts[0], *parts[1]]


def _classes(table: Table, path: Path | None) -> list[float]:
    labels: list[float] = np.unique(table.labels).tolist()
    if labels not in ([-1, 1], [0, 1], [1, 2]):
        shown = ", ".join(f"{label:g}" for label in labels[:5]) + (" ..." if len(labels) > 5 else "")
        raise UserError(f"{path}: labels must be -1 and 1, 0 and 1, or 1 and 2; this file has {shown}")
    return labels


def select(table: Table, rows: np.ndarray[Any, np.dtype[np.int64]]) -> Table:
    """These rows of a table."""
    lengths = np.diff(table.pointers)[rows]
    pointers = np.concatenate([[0], np.cumsum(lengths)])
    elements = np.arange(pointers[-1]) + np.repeat(table.pointers[rows] - pointers[:-1], lengths)
    return Table(table.labels[rows], pointers, table.columns[elements], table.values[elements])


def _prepared(table: Table, classes: list[float], features: int, length: float) -> list[Array]:
    """A table's arrays: labels as signs, without columns that training has not seen, and values divided by `length`."""
    signs = np.where(table.labels == classes[1], 1, -1).astype(np.float32)
    known = table.columns < features
    counts = np.concatenate([[0], np.cumsum(known)])
    values = (table.values[known] / length).astype(np.float32)
    return [signs, counts[table.pointers], table.columns[known], values]


def made_up_texts(seed: int) -> Table:
    """Rows of words with Zipf's frequencies; each word speaks for one class, and a tenth of that is noise."""
    rng = np.random.default_rng(seed)
    frequency = 1 / (np.arange(WORDS) + 10.0)
    drawn = rng.choice(WORDS, size=(ROWS, WORDS_A_ROW), p=frequency / frequency.sum())
    row, column = np.divmod(np.unique(np.arange(ROWS)[:, None] * WORDS + drawn), WORDS)
    lengths = np.bincount(row, minlength=ROWS)
    weight = np.log(frequency.sum() / frequency)[column]  # a rare word says more, as in tf-idf
    values = weight / np.sqrt(np.bincount(row, weight**2))[row]
    scores = np.bincount(row, values * rng.standard_normal(WORDS)[column])
    labels = np.where(scores + 0.1 * scores.std() * rng.standard_normal(ROWS) > np.median(scores), 1, -1)
    pointers = np.concatenate([[0], np.cumsum(lengths)])
    return Table(labels.astype(np.float32), pointers, column.astype(np.int32), values.astype(np.float32))
