"""Who takes the steps: compiled workers or PyTorch. The same training either way, and the run says which."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import nn

import hocket
from hocket.core.errors import UserError
from hocket.run.choice import best_engine


def dense(**settings: Any) -> hocket.Task:
    return tiny.task(26, model=lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), **settings)


TASK = dense()


def same_model(a: hocket.Result, b: hocket.Result) -> None:
    for name, tensor in a.state.items():
        torch.testing.assert_close(b.state[name], tensor)


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"lr_decay": 0.5}, {"epochs": None, "steps": 10}])
def test_serial_training_is_the_same_compiled(settings: dict[str, Any]) -> None:
    """Also where the last batch is smaller, and where the run ends inside an epoch."""
    given: dict[str, Any] = dict(strategy="serial", epochs=3) | settings
    plain, compiled = (tiny.fit(dense(), driver=driver, **given) for driver in ("pytorch", "compiled"))
    assert (plain.driver, compiled.driver) == ("pytorch", "compiled")
    same_model(plain, compiled)
    assert [p["test_accuracy"] for p in plain.curve] == [p["test_accuracy"] for p in compiled.curve]
    assert [p["train_loss"] for p in plain.curve] == pytest.approx([p["train_loss"] for p in compiled.curve])


def test_alone_shared_memory_is_serial_in_the_same_driver() -> None:
    """So what `compare` calls a speedup over serial is none of the driver's making."""
    serial, hogwild = (tiny.fit(dense(), strategy=s, driver="compiled", workers=1) for s in ("serial", "hogwild"))
    same_model(serial, hogwild)
    assert serial.shared is not None and hogwild.shared is not None
    assert serial.shared["updates"] == hogwild.shared["updates"]


def test_a_compiled_serial_run_goes_on_where_it_was(tmp_path: Path) -> None:
    settings: dict[str, Any] = dict(strategy="serial", driver="compiled", momentum=0.9)
    whole = tiny.fit(TASK, epochs=4, **settings)
    tiny.fit(TASK, epochs=2, checkpoint_every="1", out=tmp_path / "run", **settings)
    same_model(whole, hocket.resume(tmp_path / "run", task=TASK, epochs=4, progress=False))


def test_who_decides() -> None:
    assert tiny.fit(dense(), strategy="serial", workers=1).driver == "pytorch"
    assert tiny.fit(dense(), strategy="hogwild", workers=1).driver == "compiled"
    assert tiny.fit(dense(), strategy="hogwild", workers=1, driver="pytorch").driver == "pytorch"
    assert tiny.fit(dense(), strategy="hogwild", workers=1, engine="sim").driver == "pytorch"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(strategy="allreduce"), "strategy allreduce has no compiled workers; use --driver pytorch"),
        (dict(strategy="serial", engine="sim"), "compiled workers run on engine threads, not on sim"),
        (dict(strategy="serial", optimizer="adam"), "compiled workers take steps of plain sgd"),
        (dict(strategy="serial", warmup=1), "compiled workers take steps of plain sgd"),
    ],
)
def test_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny.fit(dense(), driver="compiled", **settings)


def test_a_model_that_nobody_compiled() -> None:
    odd = dense(loss=lambda output, target: nn.functional.cross_entropy(output, target) * 2)
    with pytest.raises(UserError, match="task task has no compiled form"):
        tiny.fit(odd, strategy="serial", driver="compiled")
    with pytest.raises(UserError, match="driver must be one of auto, compiled, pytorch; got 'numba'"):
        tiny.fit(odd, driver="numba")


def test_the_best_engine_has_what_the_strategy_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    from hocket.engines.mpi import Mpi

    best, _ = best_engine(frozenset({"polling"}), named=True)
    monkeypatch.setattr(Mpi, "offers", frozenset({"collectives"}))
    other, why = best_engine(frozenset({"polling"}), named=True)
    assert (best, other, why) == ("mpi", "threads", " (mpi lacks polling)")


@pytest.mark.parametrize("driver", ["compiled", "pytorch"])
@pytest.mark.parametrize("strategy", ["serial", "hogwild"])
def test_what_diverged_has_no_speed_and_reached_nothing(strategy: str, driver: str) -> None:
    """A model of NaNs calls every sample class 0, and is right now and then."""
    x, y = tiny.samples(24)
    x[3] = float("inf")
    broken = dataclasses.replace(dense(), data=((x, y), tiny.samples(12)))
    result = tiny.fit(broken, strategy=strategy, workers=1, driver=driver, epochs=3, target=0.01)
    assert result.verdict == "diverged"
    assert result.samples_per_s is None
    assert result.time_to_target is None
