"""Users' models in one batched call: what they change as they go, and every kind of target of a cross-entropy."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_batched import Looks, mlp, parameters, points, rows_of, task, trained
from torch import Tensor, nn

from hocket.core.errors import UserError
from hocket.run.spec import RunSpec
from hocket.run.train import prepare
from hocket.tasks import task as recipes


class Counts(Looks):
    """Counts its calls in place, in a buffer of which each replica has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.width = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.width = x.shape[-1]  # set when it is called first, and then no more
        out: Tensor = self.layer(x)
        return out


def test_statistics_that_are_changed_in_place() -> None:
    one_by_one, together = (trained(task(Counts), 3, batched) for batched in ("off", "on"))
    assert one_by_one.state is not None and together.state is not None
    assert together.state["calls"] == one_by_one.state["calls"] > 1


class Follows(Looks):
    """Puts a new mean in the place of the old one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        out: Tensor = self.layer(x - self.mean)
        return out


class Numbers(Looks):
    """Counts its calls in a buffer that is no part of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.layer(x)
        return out


class Anneals(Looks):
    """Counts its calls, and does so little by that that two gradients agree."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.layer(x) * (1 + 1e-6 * self.calls)
        return out


class Recalls(Looks):
    """Keeps what it said last."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        before, self.last = self.last, out.detach()
        return out if before is None or before.shape != out.shape else out + 1e-6 * before


REFUSED = {
    Follows: "puts a new tensor in the place of a buffer",
    Numbers: "keeps something from call to call",
    Anneals: "keeps something from call to call",
    Recalls: "keeps something from call to call",
}


@pytest.mark.parametrize("model", REFUSED)
def test_what_all_workers_would_share_is_not_batched(model: Callable[[], nn.Module]) -> None:
    made = task(model, count=128)
    with pytest.raises(UserError, match=rf"batched=on: the model.* {REFUSED[model]}.*; use batched=off") as refused:
        trained(made, 8, "on")
    assert "\n" not in str(refused.value)
    training = prepare(RunSpec("", engine="sim", workers=16), made)
    assert any(REFUSED[model] in note for note in training.notes) and not training.plan.batched


class Relative:
    """A loss against the mean of those before it."""

    def __init__(self) -> None:
        self.usual: Tensor | None = None

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(output, target)
        self.usual = loss.detach() if self.usual is None else 0.9 * self.usual + 0.1 * loss.detach()
        return loss / (self.usual + 1e-3)


def test_a_loss_that_remembers_is_not_batched_and_not_spoilt_by_the_trial() -> None:
    made = task(mlp, count=128, loss=Relative())
    assert isinstance(made.loss, Relative)
    with pytest.raises(UserError, match="batched=on: "):
        trained(made, 8, "on")
    training = prepare(RunSpec("", engine="sim", workers=16), made)
    assert not training.plan.batched
    assert made.loss.usual is None or not torch._C._functorch.is_batchedtensor(made.loss.usual)
    assert math.isfinite(parameters(trained(made, 8, "auto")).sum())


class Centred(Looks):
    """Has a running mean of its inputs, which it takes from them: another one at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        mean: Tensor = self.mean
        if self.training:
            mean.mul_(0.5).add_(0.5 * x.detach().mean(0))
        out: Tensor = self.layer(x - mean)
        return out


def test_a_statistic_that_counts_at_once_is_each_replicas_own() -> None:
    made = task(Centred, count=200)
    one_by_one, together = (trained(made, 8, batched) for batched in ("off", "on"))
    torch.testing.assert_close(parameters(together), parameters(one_by_one), rtol=1e-4, atol=1e-6)


class Collects(Looks):
    """Has dropout, so that two gradients never agree, and keeps a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        out: Tensor = nn.functional.dropout(self.layer(x), 0.1) * (1 + 0.01 * len(self.seen))
        return out


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"model": Collects}, "keeps something from call to call"),
        ({"on_step": lambda progress: None}, "on_epoch may change the model"),
        ({"on_epoch": lambda progress: None}, "on_epoch may change the model"),
    ],
)
def test_what_may_change_a_model_is_seen(more: Any, why: str) -> None:
    made = dataclasses.replace(task(mlp, count=128), **more)
    with pytest.raises(UserError, match=f"batched=on: .*{why}.*; use batched=off"):
        trained(made, 8, "on")


def tokens(count: int) -> tuple[Tensor, Tensor]:
    """A class for each of four places, of which some do not count."""
    g = torch.Generator().manual_seed(7)
    x, y = torch.randn(count, 4, 5, generator=g), torch.randint(3, (count, 4), generator=g)
    return x, torch.where(torch.rand(count, 4, generator=g) < 0.3, -100, y)


class Tagger(Looks):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x).transpose(1, 2)
        return out


def likelihoods(count: int) -> tuple[Tensor, Tensor]:
    x, y = points(count)
    return x, 0.8 * nn.functional.one_hot(y, 3) + 0.1


@pytest.mark.parametrize(("model", "data"), [(Tagger, tokens), (mlp, likelihoods)])
@pytest.mark.parametrize("loss", [nn.functional.cross_entropy, nn.CrossEntropyLoss(label_smoothing=0.1)])
def test_cross_entropy_of_every_kind_of_target(model: Any, data: Any, loss: Any) -> None:
    made = task(model, data, 200, loss=loss, metric=lambda out, _: out.square().mean())
    one_by_one, together = (trained(made, 5, batched) for batched in ("off", "on"))
    torch.testing.assert_close(parameters(together), parameters(one_by_one), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["blobs", "digits", "mnist-mlp", "mnist-cnn"])
def test_built_in_tasks(name: str) -> None:
    if name.startswith("mnist") and not Path(os.environ.get("HOCKET_DATA", ""), "mnist").is_dir():
        pytest.skip("set HOCKET_DATA")
    rows, models = rows_of(recipes.make(name).make(0, None), 3)
    index = torch.arange(24)
    losses = rows.gradients(range(3), index)
    for model, loss, own in zip(models, losses, index.split(8), strict=True):
        found = model.replica.g.clone()
        torch.testing.assert_close(loss, model.compute(own))
        torch.testing.assert_close(found, model.replica.g, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "why"), [("factorization", "an autograd.Function in it"), ("word2vec", "no plain tensors")]
)
def test_built_in_tasks_that_are_not_batched(name: str, why: str) -> None:
    training = prepare(RunSpec(name, engine="sim", workers=8))
    assert any(why in note for note in training.notes) and not training.plan.batched
