"""Who likes what: ratings as products of a few factors of users and items, found by matrix factorization."""

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

from hocket.core.errors import UserError
from hocket.tasks import ratings
from hocket.tasks.base import BringsKernel, Task, task
from hocket.tasks.footprint import check_fits
from hocket.tasks.lent import Array, lent
from hocket.tasks.linear import HELD_OUT, decayed
from hocket.tasks.ratings import Ratings

if TYPE_CHECKING:
    from hocket.kernels.models.family import Kernel

# The generated set: products of a few factors, and noise.
USERS, ITEMS, TRUE_RANK, RATINGS, NOISE = 500, 300, 4, 40_000, 0.3

COPIES = 3
"""Of each parameter, at least: the model as it is made, the flat vector, and its gradient."""

Pairs = tuple[Tensor, Tensor]
"""[samples, 2] with a user and an item each, and their ratings."""


class Factors(BringsKernel):
    """rating = mean + bias of the user + bias of the item + product of their factors (Koren et al. 2009, equation 4).

    In training l2 / 2 times the square of every number that a rating depends on is added to its error.
    """

    mean: Tensor

    def __init__(self, users: int, items: int, rank: int, mean: float, l2: float) -> None:
        super().__init__()
        self.l2 = l2
        self.users = nn.Parameter(0.1 * torch.randn(users, rank))
        self.items = nn.Parameter(0.1 * torch.randn(items, rank))
        self.user_bias = nn.Parameter(torch.zeros(users))
        self.item_bias = nn.Parameter(torch.zeros(items))
        self.register_buffer("mean", torch.tensor(mean))

    def forward(self, pairs: Tensor) -> Tensor:
        user, item = pairs.T
        found = self.users[user], self.items[item], self.user_bias[user], self.item_bias[item]
        if self.training and self.l2:
            strength = torch.full((), self.l2 / len(pairs), device=pairs.device)
            p, q, b, c = (decayed(values, strength) for values in found)
        else:
            p, q, b, c = found
        return self.mean + b + c + (p * q).sum(1)

    def kernel(self, loss: Callable[..., Tensor], samples: Any) -> Kernel | None:
        if loss is not F.mse_loss or not isinstance(samples, tuple):
            return None
        from hocket.kernels.models.factors import FactorKernel  # Numba takes half a second to import

        (users, rank), items = self.users.shape, len(self.items)
        return FactorKernel(
            samples[0].numpy(), samples[1].numpy(), users, items, rank, float(self.mean), float(self.l2)
        )


@task("factorization")
@dataclass(frozen=True)
class Factorization:
    """Matrix factorization of ratings: a file of `user item rating` (--data, --test-data), or 40,000 made-up ones."""

    name: ClassVar[str]
    rank: int = 8
    """Factors of each user and item."""
    l2: float = 0.05
    """Strength of the penalty on factors and biases, for each rating."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UserError(f"task factorization: rank must be 1 or more; got {self.rank}")
        if not (math.isfinite(self.l2) and self.l2 >= 0):
            raise UserError(f"task factorization: l2 must be 0 or more; got {self.l2}")

    def make(self, seed: int, data: Path | None, test_data: Path | None = None) -> Task:
        if data is None and test_data is not None:
            raise UserError("task factorization: --test-data goes with --data; name the training file too")
        samples = functools.cache(functools.partial(load, seed, data, test_data))

        def model() -> Factors:
            (pairs, values), (test_pairs, _) = samples()
            users, items = (torch.maximum(pairs.amax(0), test_pairs.amax(0)) + 1).tolist()
            check_fits(
                COPIES * 4 * (users + items) * (self.rank + 1),
                f"task factorization: {self.rank} factors of {users} users and {items} items",
                "choose a smaller rank",
            )
            return Factors(users, items, self.rank, float(values.mean()), self.l2)

        return Task(
            model,
            samples,
            loss=F.mse_loss,
            metric=F.mse_loss,
            metric_name="mse",
            lower_is_better=True,
            target=0.12 if data is None else None,
            epochs=10,
            batch=16,
            lr=0.8,
            lr_decay=0.85,
        )


def load(seed: int, data: Path | None, test_data: Path | None) -> tuple[Pairs, Pairs]:
    """(train, test); users and items are numbered from 0 in the order of their numbers in the files."""
    read = functools.partial(decode, seed, data, test_data)
    pairs, values, test_pairs, test_values = map(torch.from_numpy, lent([data, test_data], ["ratings", seed], read))
    return (pairs, values), (test_pairs, test_values)


def decode(seed: int, data: Path | None, test_data: Path | None) -> list[Array]:
    """Pairs and ratings to train on, and those to test on."""
    table = ratings.read(data) if data is not None else made_up_ratings(seed)
    if test_data is not None:
        test = ratings.read(test_data)
        held_out = len(test)
        table = Ratings(
            np.concatenate([test.users, table.users]),
            np.concatenate([test.items, table.items]),
            np.concatenate([test.ratings, table.ratings]),
        )
        order = np.arange(len(table))
    else:
        held_out = int(HELD_OUT * len(table))
        if not held_out:
            raise UserError(
                f"{data} has only {len(table)} ratings, too few to hold some out; pass --test-data FILE too"
            )
        order = np.random.default_rng(seed).permutation(len(table))
    users, items = (np.unique(column, return_inverse=True)[1] for column in (table.users, table.items))
    pairs, values = np.stack([users, items], axis=1)[order], table.ratings[order]
    return [pairs[held_out:], values[held_out:], pairs[:held_out], values[:held_out]]


def made_up_ratings(seed: int) -> Ratings:
    """Ratings around 3.5 that have TRUE_RANK factors behind them; the noise is what no model can foresee."""
    rng = np.random.default_rng(seed)
    user_factors, item_factors = rng.standard_normal((USERS, TRUE_RANK)), rng.standard_normal((ITEMS, TRUE_RANK))
    chosen = rng.choice(USERS * ITEMS, RATINGS, replace=False)
    users, items = np.divmod(chosen, ITEMS)
    likes = (user_factors[users] * item_factors[items]).sum(1) / math.sqrt(TRUE_RANK)
    values = 3.5 + likes + NOISE * rng.standard_normal(RATINGS)
    return Ratings(users, items, values.astype(np.float32))
