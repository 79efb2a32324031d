"""Gradients of many workers in one call give what they give one by one: for every strategy, and for users' models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import fit
from torch import Tensor, nn

import hocket
from hocket.core.errors import UserError
from hocket.core.replica import Replica
from hocket.drivers import batched
from hocket.drivers.batched import Pending, Rows
from hocket.drivers.gradients import WholeModel
from hocket.engines import batons
from hocket.run import batching, room
from hocket.run.spec import RunSpec
from hocket.run.train import prepare
from hocket.strategies import strategy
from hocket.tasks import task as recipes

SIDE = 6


def points(count: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(7)
    x = torch.randn(count, 5, generator=g)
    return x, (x @ torch.randn(5, 3, generator=g)).argmax(-1)


def pictures(count: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(7)
    x = torch.randn(count, 1, SIDE, SIDE, generator=g)
    return x, x.flatten(1)[:, :3].argmax(-1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def channels_last() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(64, 3)).to(memory_format=torch.channels_last)


class Attention(nn.Module):
    """Rows of a picture look at each other; with a buffer that is no statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(SIDE, 2, batch_first=True)
        self.norm, self.last = nn.LayerNorm(SIDE), nn.Linear(SIDE, 3)
        self.register_buffer("position", torch.linspace(-1, 1, SIDE)[:, None].expand(SIDE, SIDE).clone())

    def forward(self, x: Tensor) -> Tensor:
        rows = x[:, 0] + self.position
        seen, _ = self.attention(rows, rows, rows, need_weights=False)
        out: Tensor = self.last(self.norm(rows + seen).mean(1))
        return out


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.5), nn.Linear(64, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]]]] = {
    "mlp": (mlp, points),
    "cnn": (cnn, pictures),
    "channels_last": (channels_last, pictures),
    "attention": (Attention, pictures),
}


def task(model: Callable[[], nn.Module] = mlp, data: Any = points, count: int = 37, **settings: Any) -> hocket.Task:
    return hocket.Task(model=model, data=(data(count), data(12)), **{"batch": 4, "epochs": 2, "lr": 0.1} | settings)


def trained(made: hocket.Task, workers: int, batched: str, **settings: Any) -> hocket.Result:
    return fit(made, **{"engine": "sim", "sim": {"batched": batched}, "workers": workers, "seed": 3} | settings)


def parameters(result: hocket.Result) -> Tensor:
    assert result.state is not None
    return torch.cat([t.reshape(-1) for _, t in sorted(result.state.items())])


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("name", list(strategy))
def test_every_strategy_trains_as_without(name: str, workers: int) -> None:
    """37 samples in batches of 4: the last are uneven, and some workers get nothing of them."""
    if strategy.make(name).most_workers < workers:
        pytest.skip(f"{name} has fewer workers")
    one_by_one, together = (trained(task(), workers, batched, strategy=name) for batched in ("off", "on"))
    torch.testing.assert_close(parameters(together), parameters(one_by_one), rtol=1e-4, atol=1e-6)
    assert together.virtual_seconds == one_by_one.virtual_seconds
    assert together.curve[-1]["train_loss"] == pytest.approx(one_by_one.curve[-1]["train_loss"], rel=1e-4)


@pytest.mark.parametrize("name", [*strategy, "server:mode=async", "gossip:kind=adpsgd"])
def test_sixty_four_workers(name: str) -> None:
    if strategy.make(name).most_workers < 64:
        pytest.skip(f"{name} has fewer workers")
    made = task(count=64 * 4 * 3 + 17, epochs=1)
    one_by_one, together = (trained(made, 64, batched, strategy=name) for batched in ("off", "auto"))
    torch.testing.assert_close(parameters(together), parameters(one_by_one), rtol=1e-4, atol=1e-5)
    assert together.virtual_seconds == one_by_one.virtual_seconds


@pytest.mark.parametrize("name", MODELS)
def test_users_models(name: str) -> None:
    model, data = MODELS[name]
    made = task(model, data)
    one_by_one, together = (trained(made, 3, batched) for batched in ("off", "on"))
    torch.testing.assert_close(parameters(together), parameters(one_by_one), rtol=1e-4, atol=1e-6)


def rows_of(made: hocket.Task, count: int) -> tuple[Rows, list[WholeModel]]:
    train, _ = made.load()
    rows = Rows(made, train, count)
    models = [rows.replica(row, made.build_model(row).train(), torch.device("cpu")) for row in range(count)]
    return rows, [WholeModel(made, replica, train) for replica in models]


@pytest.mark.parametrize("chosen", [(0, 1, 2, 3, 4), (1, 2, 3), (0, 2, 4), (3,)])
def test_only_those_that_asked_get_a_gradient(chosen: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    rows, models = rows_of(task(), 5)
    monkeypatch.setattr(batched, "AT_ONCE", 2)
    pending = Pending(rows)
    for model in models:
        model.replica.g.fill_(7.0)
    index = {row: torch.arange(row, row + 3 + row % 2) for row in chosen}
    for row in chosen:
        pending.ask(row, index[row])
    losses = {row: pending.take(row) for row in chosen}
    for row, model in enumerate(models):
        found = model.replica.g.clone()
        if row not in chosen:
            assert (found == 7.0).all()
            continue
        alone = model.compute(index[row])
        torch.testing.assert_close(found, model.replica.g)
        assert alone is not None and losses[row] == pytest.approx(float(alone))


def test_dropout_differs_from_worker_to_worker() -> None:
    rows, models = rows_of(task(dropout), 2)
    models[1].replica.x.copy_(models[0].replica.x)
    rows.gradients([0, 1], torch.arange(4).repeat(2))
    assert not torch.equal(models[0].replica.g, models[1].replica.g)


@pytest.mark.parametrize("batched", ["on", "off"])
@pytest.mark.parametrize("name", ["allreduce", "server:mode=async"])
def test_two_runs_agree_to_the_last_bit(batched: str, name: str) -> None:
    first, second = (parameters(trained(task(dropout), 9, batched, strategy=name)) for _ in range(2))
    assert torch.equal(first, second)


class Looks(nn.Module):
    """Its way depends on its data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out if x.sum() > 0 else -out


class Draws(Looks):
    """Skips a layer at random, by Python's generator."""

    def forward(self, x: Tensor) -> Tensor:
        import random

        out: Tensor = self.layer(x)
        return out * (1 + random.random())


def norm() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


REFUSED = {norm: "BatchNorm1d changes its statistics", Looks: "depends on its data", Draws: "Python's or NumPy's"}


@pytest.mark.parametrize("model", REFUSED)
def test_what_cannot_be_batched_is_said_in_one_line(model: Callable[[], nn.Module]) -> None:
    made = task(model, count=128)  # even batches: BatchNorm refuses one sample
    with pytest.raises(UserError, match=rf"batched=on: .*{REFUSED[model]}.*; use batched=off") as refused:
        trained(made, 8, "on")
    assert "\n" not in str(refused.value)
    training = prepare(RunSpec("", engine="sim", workers=16), made)
    assert any(REFUSED[model] in note for note in training.notes) and not training.plan.batched
    assert trained(made, 16, "auto").verdict == "finished"


@pytest.mark.parametrize("settings", [dict(accumulate=2), dict(autocast="bf16"), dict(layout="tensor=2")])
def test_gradients_that_are_computed_in_other_ways(settings: dict[str, Any]) -> None:
    made, (name,) = task(count=128), settings
    with pytest.raises(UserError, match=f"batched=on: that does not go with {name}; use batched=off"):
        trained(made, 8, "on", **settings)
    training = prepare(RunSpec("", engine="sim", workers=16, **settings), made)
    assert training.notes == (f"gradients are computed one by one: that does not go with {name}",)


def test_measured_times_need_gradients_one_by_one() -> None:
    with pytest.raises(UserError, match="batched=off"):
        trained(task(), 2, "on", sim={"compute": "measured", "batched": "on"})
    timed = prepare(RunSpec("", engine="sim", workers=16, sim={"compute": "measured"}), task(count=80))
    assert not timed.plan.batched


@pytest.mark.skipif(batons.greenlet is None, reason="greenlet is not installed")
@pytest.mark.parametrize("name", list(strategy))
def test_greenlets_give_what_threads_give(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = min(5, strategy.make(name).most_workers)
    within = trained(task(), workers, "on", strategy=name)
    monkeypatch.setattr(batons, "greenlet", None)
    between = trained(task(), workers, "on", strategy=name)
    assert torch.equal(parameters(within), parameters(between))
    assert within.virtual_seconds == between.virtual_seconds


class Counts(Looks):
    """Looks at a histogram, which PyTorch batches by a loop."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x + torch.histc(x.detach(), 5))
        return out


class Remembers(Looks):
    """Reads what it sees as a row of numbers, with cells that PyTorch cannot batch at all."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(1, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.cells(x[..., None])[0][:, -1])
        return out


@pytest.mark.parametrize(("model", "operation"), [(Counts, "histc"), (Remembers, "gru")])
def test_what_pytorch_has_no_batched_form_of(model: Callable[[], nn.Module], operation: str) -> None:
    training = prepare(RunSpec("", engine="sim", workers=16), task(model, count=80))
    why_not = f"gradients are computed one by one: PyTorch has no batched form of {operation}"
    assert training.notes == (why_not,) and not training.plan.batched


def test_attention_has_a_batched_form() -> None:
    """Its one kernel on the CPU has none, but what that is made of has."""
    assert prepare(RunSpec("", engine="sim", workers=16), task(Attention, pictures, 80)).plan.batched


def test_what_does_not_fit_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """75 parameters of 4 bytes, 5 vectors of them a worker."""
    nbytes = 9 * 75 * 4 * 5
    monkeypatch.setattr(room, "machine_bytes", lambda: nbytes)
    monkeypatch.setattr(room, "TOLD", nbytes - 1)
    assert (
        prepare(RunSpec("", engine="sim", workers=9), task(count=80)).notes[0].startswith("9 replicas of 75 parameters")
    )
    with pytest.raises(UserError, match=r"10 replicas of 75 parameters take about 0\.0 GB, and this machine has"):
        prepare(RunSpec("", engine="sim", workers=10), task(count=80))


def test_more_processes_than_memory_are_refused_with_the_engine_that_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "machine_bytes", lambda: 10 * room.PROCESS)
    with pytest.raises(UserError, match=r"11 processes take 0\.6 GB for Python.* has 0\.5 GB; use --engine sim"):
        prepare(RunSpec("blobs", engine="torch", workers=11))
    prepare(RunSpec("blobs", engine="torch", workers=10))


def test_a_batch_that_nobody_asked_for_is_no_larger_than_what_a_worker_has() -> None:
    training = prepare(RunSpec("", engine="sim", workers=12), task())  # 37 samples, batches of 4
    assert training.plan.batch == 3
    assert training.notes[0] == "batch 3 in place of the task's 4: a worker has no more samples"
    with pytest.raises(UserError, match="batch 4 is larger than a worker's shard of 3 samples"):
        prepare(RunSpec("", engine="sim", workers=12, batch=4), task())


def test_a_thousand_replicas_of_the_mnist_perceptron_fit_in_8_gb() -> None:
    model = Replica(recipes.make("mnist-mlp").make(0, None).build_model(0))
    assert 1024 * room.VECTORS * 4 * model.values.numel() < 8e9


def test_a_large_model_is_left_alone() -> None:
    batch = 2**18 // 75 + 1
    training = prepare(RunSpec("", engine="sim", workers=16), task(count=16 * batch, batch=batch))
    assert "of this size is no faster in batches" in training.notes[0] and not training.plan.batched


@pytest.mark.parametrize(("share", "batched"), [(0.9, True), (1.1, False)])
def test_the_clock_decides(share: float, batched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients in one call take this share of what they take one by one."""
    monkeypatch.setattr(batching, "_seconds", lambda call: share if call.__name__ == "all_at_once" else 1.0)
    training = prepare(RunSpec("", engine="sim", workers=16), task(count=80))
    assert training.plan.batched == batched
    told = "gradients are computed one by one: this model is no faster in batches on the CPU"
    assert training.notes == (() if batched else (told,))


@pytest.mark.parametrize("name", ["local-sgd", "server:mode=async", "gossip:kind=adpsgd"])
def test_a_look_at_the_model_changes_nothing(name: str) -> None:
    """Though other gradients may be computed together than without it."""
    made = task(count=17 * 4 * 4, epochs=2)
    seldom, often = (trained(made, 17, "on", strategy=name, evaluate_every=every) for every in (1.0, 0.25))
    assert torch.equal(parameters(seldom), parameters(often))


@pytest.mark.parametrize("name", ["local-sgd", "server:mode=async"])
def test_a_run_goes_on_to_the_last_bit(name: str, tmp_path: Path) -> None:
    def run(folder: str, **more: Any) -> hocket.Result:
        settings = {"strategy": name, "workers": 17, "sim": {"batched": "on"}, "checkpoint_every": "1"}
        return hocket.fit("digits", out=tmp_path / folder, progress=False, **settings | more)

    whole = run("whole", epochs=4)
    run("part", epochs=2)
    resumed = hocket.resume(tmp_path / "part", epochs=4, progress=False)
    assert torch.equal(parameters(whole), parameters(resumed))
