"""Replicas that compiled threads train, each worker's its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import nn

import hocket
from hocket.core.errors import UserError


def perceptron() -> hocket.Task:
    return hocket.Task(
        lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)),
        data=(tiny.three_classes(), tiny.three_classes()),
        batch=4,
        epochs=3,
    )


def alike(one: hocket.Result, other: hocket.Result, **tolerance: float) -> bool:
    """To the last bit, unless a tolerance is given."""
    if not tolerance:
        return all(one.state[name].equal(other.state[name]) for name in one.state)
    return all(torch.allclose(one.state[name], other.state[name], **tolerance) for name in one.state)


def test_one_thread_of_one_worker_is_serial() -> None:
    serial = tiny.fit(perceptron(), strategy="serial", driver="compiled")
    assert alike(tiny.fit(perceptron(), strategy="local-sgd:hogwild=1,every=7", workers=1), serial)


@pytest.mark.parametrize("every", [1, 3])
def test_one_thread_a_worker_is_local_sgd(every: int) -> None:
    settings: dict[str, Any] = {"workers": 3, "batch": 7}  # the last step of an epoch is a small one
    plain = tiny.fit(perceptron(), strategy=f"local-sgd:every={every}", **settings)
    threaded = tiny.fit(perceptron(), strategy=f"local-sgd:every={every},hogwild=1", **settings)
    assert alike(threaded, plain, rtol=1e-4, atol=1e-5)
    assert (plain.driver, threaded.driver) == ("pytorch", "compiled")
    assert threaded.bytes_sent == plain.bytes_sent
    assert [point["step"] for point in threaded.curve] == [point["step"] for point in plain.curve]
    for mine, theirs in zip(threaded.curve, plain.curve, strict=True):
        assert mine["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-3)


def test_several_threads_take_every_sample_once() -> None:
    found = tiny.fit(perceptron(), strategy="local-sgd:hogwild=3,every=5", workers=2, epochs=30)
    assert [worker["samples"] for worker in found.per_worker] == [30 * 120] * 2
    assert found.test_metric > 0.85


@pytest.mark.parametrize("task", ["perceptron", "word2vec"])
def test_a_run_that_was_saved_goes_on_as_if_nothing_had_happened(task: str, tmp_path: Path) -> None:
    made = perceptron() if task == "perceptron" else task
    settings: dict[str, Any] = {"workers": 2, "engine": "threads", "progress": False}
    settings["strategy"] = "local-sgd:hogwild=1,every=5" + (",hot=0.1" if task == "word2vec" else "")
    whole = hocket.fit(made, epochs=3, **settings)
    hocket.fit(made, epochs=3, checkpoint_every=1, out=tmp_path / "run", **settings)
    _, last = sorted((tmp_path / "run" / "checkpoints").iterdir())
    last.unlink()  # as if it had been killed before the end
    (tmp_path / "run" / "result.json").unlink()
    own = {} if isinstance(made, str) else {"task": made}
    assert alike(hocket.resume(tmp_path / "run", progress=False, **own), whole)


def test_hot_rows_are_averaged_every_time_and_all_now_and_then() -> None:
    """By what is sent: 172 steps an epoch, an average every 4 of them, of all rows every 5 of these and in the end."""
    settings: dict[str, Any] = {"workers": 2, "epochs": 1, "engine": "threads", "progress": False}
    of_all = hocket.fit("word2vec:dim=16", strategy="local-sgd:hogwild=1,every=4", **settings)
    of_hot = hocket.fit("word2vec:dim=16", strategy="local-sgd:hogwild=1,every=4,hot=0.1,between=5", **settings)
    words = of_all.state["inputs"].shape[0]
    rounds, whole = divmod(of_all.steps, 4)[0], 4 * 2 * words * 16
    hot = 4 * 2 * -(-words // 10) * 16
    assert of_all.bytes_sent == pytest.approx(2 * rounds * whole, rel=0.01)
    assert of_hot.bytes_sent == pytest.approx(2 * (rounds // 5 * whole + (rounds - rounds // 5) * hot), rel=0.1)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (dict(strategy="local-sgd:hogwild=-1"), "hogwild must be from 0 to 1024"),
        (dict(strategy="local-sgd:hogwild=2,hot=1.0"), "hot from 0 to below 1"),
        (dict(strategy="local-sgd:hogwild=2,group=2"), "hogwild threads go with every, hot and between alone"),
        (dict(strategy="local-sgd:hogwild=2,hot=0.1"), "has no rows that are changed more often than others"),
        (dict(strategy="local-sgd:hogwild=2", engine="sim"), "compiled workers run on engine .*, not on sim"),
        (dict(strategy="local-sgd:hogwild=2", driver="pytorch"), "leave hogwild out"),
        (dict(strategy="local-sgd:hogwild=2", compress="int8"), "leave hogwild out"),
        (dict(strategy="local-sgd:hogwild=2", clip=1.0), "leave hogwild out"),
        (dict(strategy="local-sgd:hogwild=2", engine="mpi", bind="core"), "--bind core gives a worker one core"),
    ],
)
def test_refused(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        tiny.fit(perceptron(), workers=2, **settings)
