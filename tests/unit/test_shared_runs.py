"""Whole runs in shared memory: every method on every engine, what is measured of them, and what is refused."""

from __future__ import annotations

import dataclasses
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import tiny
import torch
from leftovers import segments, vanish
from torch import nn

import hocket
from hocket.app import cli
from hocket.core.comm import Rank
from hocket.core.sharing import Backoff, Method, Sharing
from hocket.core.staleness import Handling
from hocket.drivers.compiled import kernel_for
from hocket.engines.catalogue import Listener, Program, engine
from hocket.measure.losses import PARTS
from hocket.run.loading import load_task
from hocket.run.rank import run_program
from hocket.run.resolve import resolve
from hocket.run.spec import RunSpec
from hocket.strategies import strategy

METHODS = get_args(Method)
EPOCHS, BATCH, SAMPLES = 6, 32, 1437
BATCHES = 45
"""Of 32 in 1437 samples."""


def convolution() -> nn.Module:
    """No perceptron, so that Python computes its gradients; with BatchNorm, whose statistics are not shared."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
    )


def digits(**changes: Any) -> hocket.Task:
    return dataclasses.replace(load_task("digits", 0, None), **changes)


def fit(task: str | hocket.Task, **settings: Any) -> hocket.Result:
    return hocket.fit(task, **{"engine": "threads", "epochs": EPOCHS, "workers": 2, "progress": False} | settings)


def check(result: hocket.Result, method: str, batches: int) -> None:
    """All that a run must say of itself, and that it agrees."""
    found = result.shared
    assert found is not None
    steps = sum(worker["steps"] for worker in result.per_worker)
    assert found["updates"] + found["dropped"] == steps == batches
    assert sum(result.staleness["histogram"].values()) == found["updates"]
    assert result.staleness["max"] == max(map(int, result.staleness["histogram"]))
    sharing = strategy.make(result.strategy).sharing(1, result.workers)
    assert sharing is not None and 1 + result.workers <= found["peak_vectors"] <= sharing.vectors
    if method == "leashed":
        assert sum(found["failed_tries"].values()) == steps
        assert found["peak_vectors"] <= 3 * result.workers + 1
    else:
        assert found["failed_tries"] == {} and found["dropped"] == 0
    if method in ("hogwild", "leashed"):
        assert (found["lock_wait_s"] > 0) == any(int(tries) for tries in found["failed_tries"])
    assert sum(worker["locks"] for worker in result.per_worker) == pytest.approx(found["lock_wait_s"])
    assert found["lock_wait_s"] >= 0 and found["recovered_locks"] == 0
    clock_s = result.seconds if result.virtual_seconds is None else result.virtual_seconds
    assert found["updates_per_s"] * clock_s == pytest.approx(found["updates"])
    assert result.compile_seconds is not None and result.compile_seconds >= 0

    assert list(result.time_to_loss) == [f"{part:g}" for part in PARTS]
    times = list(result.time_to_loss.values())
    reached = [t for t in times if t is not None]
    assert times[: len(reached)] == reached == sorted(reached), "in the order of the parts, and never again None"
    if reached:  # a worker of whom the others left little has not seen the loss fall
        assert 0 < reached[0] <= reached[-1] <= max(worker["seconds"] for worker in result.per_worker)
    assert [point["epoch"] for point in result.curve] == [pytest.approx(k + 1) for k in range(len(result.curve))]
    assert all(a["seconds"] < b["seconds"] for a, b in pairwise(result.curve))


def kernel(task: hocket.Task, method: str) -> Any:
    train, _ = task.load()
    return kernel_for(resolve(RunSpec("own", strategy=method, workers=1), task, len(train)), task, train)


@pytest.mark.parametrize("method", METHODS)
class TestLearning:
    def test_compiled(self, method: str) -> None:
        assert kernel(digits(), method) is not None
        result = fit("digits", strategy=method, epochs=30)
        check(result, method, 30 * BATCHES)
        assert result.verdict == "finished" and result.test_accuracy > 0.9
        assert sum(worker["samples"] for worker in result.per_worker) == 30 * SAMPLES

    def test_any_module(self, method: str) -> None:
        task = digits(model=convolution)
        assert kernel(task, method) is None
        result = fit(task, strategy=method, epochs=3)
        check(result, method, 3 * (BATCHES + 1))  # the last batches of an epoch are two small ones
        assert result.verdict == "finished" and result.test_accuracy > 0.7
        assert sum(worker["samples"] for worker in result.per_worker) == 3 * SAMPLES

    def test_simulated(self, method: str) -> None:
        result = fit("digits", strategy=method, engine="sim", workers=3)
        check(result, method, EPOCHS * BATCHES)  # 15 steps of 3 workers an epoch
        assert result.verdict == "finished" and result.test_accuracy > 0.9
        assert result.staleness["max"] > 0
        assert result.time_to_loss["75"] is not None and result.time_to_loss["50"] is not None

    @pytest.mark.parametrize("driver", ["compiled", "python", "sim"])
    def test_alone_it_is_serial(self, method: str, driver: str) -> None:
        """Nothing is stale, so that no way to temper changes anything either."""
        made = tiny.task(26)
        if driver == "python":
            made = dataclasses.replace(made, model=lambda: nn.Sequential(tiny.model(), nn.Identity()))
        is_compiled = kernel(made, method) is not None
        assert is_compiled == (driver != "python")
        settings: dict[str, Any] = dict(workers=1, epochs=3, lr_decay=0.5)
        settings["momentum"] = 0.9
        serial = tiny.fit(made, strategy="serial", **settings)
        for handling in get_args(Handling):
            strategy = f"{method}:stale={handling}"
            result = tiny.fit(made, strategy=strategy, engine="sim" if driver == "sim" else "threads", **settings)
            assert result.staleness["histogram"] == {"0": 21}
            for name, tensor in serial.state.items():
                torch.testing.assert_close(result.state[name], tensor, msg=f"{handling}: {name}")

    def test_any_optimizer(self, method: str) -> None:
        """Adam's steps, taken in the shared vector."""
        made = tiny.task(26)
        settings: dict[str, Any] = dict(workers=1, epochs=3, optimizer="adam", lr=0.05)
        serial = tiny.fit(made, strategy="serial", **settings)
        result = tiny.fit(made, strategy=method, **settings)
        for name, tensor in serial.state.items():
            torch.testing.assert_close(result.state[name], tensor, rtol=1e-4, atol=1e-5)

    def test_a_run_may_end_inside_an_epoch(self, method: str) -> None:
        compiled = fit("digits", strategy=method, epochs=None, steps=25)  # 23 steps an epoch
        check_steps(compiled, BATCHES + 2 * 2)
        simulated = fit("digits", strategy=method, epochs=None, steps=25, engine="sim")
        check_steps(simulated, 2 * 25)

    @pytest.mark.parametrize("driver", ["compiled", "python", "sim"])
    def test_divergence_is_the_verdict_and_ends_the_run(self, method: str, driver: str) -> None:
        task: Any = digits(model=convolution) if driver == "python" else "digits"
        engine_name = "sim" if driver == "sim" else "threads"
        result = fit(task, strategy=method, engine=engine_name, lr=1e30, epochs=3)
        assert result.verdict == "diverged"
        assert result.diverged_at_step is not None and 1 <= result.diverged_at_step <= BATCHES
        if driver == "compiled":
            assert len(result.curve) == 1, "the workers meet after the first epoch"

    def test_a_target_is_reached(self, method: str) -> None:
        result = fit("digits", strategy=method, epochs=40, target=0.8)
        assert result.verdict == "reached-target"
        assert result.test_accuracy >= 0.8 and len(result.curve) < 40

    @pytest.mark.parametrize("handling", get_args(Handling))
    def test_every_way_to_temper(self, method: str, handling: str) -> None:
        strategy = f"{method}:stale={handling}"
        result = tiny.fit(tiny.task(240), strategy=strategy, workers=3, epochs=3)
        assert result.verdict == "finished"
        assert result.shared is not None
        assert sum(result.staleness["histogram"].values()) == result.shared["updates"] == 180
        assert result.test_accuracy > 0.7
        copies = 3 if method in ("mutex", "rwlock") or handling in ("gap", "gap-mean", "delay-compensated") else 0
        squares = 3 if handling == "gap" else 0
        slots = 2 * 3 + 1 if method == "leashed" else 1
        assert result.shared["peak_vectors"] <= slots + copies + squares + 3

    @pytest.mark.parametrize("backoff", get_args(Backoff))
    def test_every_backoff(self, method: str, backoff: str) -> None:
        strategy = f"{method}:backoff={backoff},backoff_us=5,backoff_max_us=100"
        result = tiny.fit(tiny.task(240), strategy=strategy, workers=4, epochs=2)
        assert result.verdict == "finished"
        assert result.shared is not None and result.shared["updates"] == 120


def check_steps(result: hocket.Result, batches: int) -> None:
    assert result.steps == 25
    assert sum(worker["steps"] for worker in result.per_worker) == batches
    assert result.shared is not None and result.shared["updates"] == batches
    assert len(result.curve) == 2 and result.curve[-1]["step"] == 25


@pytest.mark.parametrize("strategy", ["leashed:persistence=0", "leashed:persistence=3", "leashed:persistence=inf"])
def test_every_batch_is_applied_or_dropped(strategy: str) -> None:
    result = fit("digits", strategy=strategy, workers=4, epochs=3, batch=1)
    assert result.shared is not None
    assert result.shared["updates"] + result.shared["dropped"] == 3 * SAMPLES
    assert sum(result.staleness["histogram"].values()) == result.shared["updates"]
    assert sum(result.shared["failed_tries"].values()) == 3 * SAMPLES
    if strategy.endswith("inf"):
        assert result.shared["dropped"] == 0


@pytest.mark.parametrize("name", ["logistic", "svm", "factorization"])
def test_sparse_tasks_learn_with_every_method(name: str) -> None:
    """Two epochs of the generated set in compiled threads: everyone takes a part of each epoch's batches."""
    task = load_task(name, 0, None)
    batches = -(-len(task.load()[0]) // task.batch)
    for method in METHODS:
        result = hocket.fit(task, strategy=method, workers=2, epochs=2, progress=False)
        assert result.engine == "threads", "that is where compiled workers are"
        assert result.shared is not None and result.shared["updates"] == 2 * batches
        assert result.test_metric is not None
        assert result.test_metric < 1.2 if task.lower_is_better else result.test_metric > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_mnist_is_learnt_with_every_method(method: str) -> None:
    if not Path(os.environ.get("HOCKET_DATA", ""), "mnist").is_dir():
        pytest.skip("MNIST is not here")
    # Mostly 0.972 to 0.979; on a busy machine one run in fifty is just below 0.97
    runs = [hocket.fit("mnist-mlp", strategy=method, workers=2, seed=s, progress=False) for s in (0, 1)]
    reached = [result.test_accuracy or 0.0 for result in runs]
    assert max(reached) >= 0.97 and min(reached) >= 0.95


def every_method(rank: Rank, argument: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank's process does in the next test: four runs, as starting takes longest."""
    return [run_program(rank, argument | {"strategy": method}) for method in METHODS]


@pytest.mark.parametrize("name", ["mpi", "torch"])
def test_processes_learn_with_every_method(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = [*map(str, Path(__file__).parents[:2]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(here))
    epochs = 2 * EPOCHS
    before = segments()
    plan = resolve(RunSpec("digits", strategy="mutex", workers=2, epochs=epochs), digits(), SAMPLES)
    program = Program("test_shared_runs:every_method", plan.to_json())
    ranks = engine.make(f"{name}:deadline=60").run(program, 2, Listener())
    for i, method in enumerate(METHODS):
        first, second = ranks[0][i], ranks[1][i]
        assert first["verdict"] == second["verdict"] == "finished"
        shared = first["shared"]
        assert "shared" not in second, "rank 0 speaks for all"
        assert shared["updates"] + shared["dropped"] == first["steps"] + second["steps"] == epochs * (BATCHES + 1)
        assert sum(first["staleness"].values()) == shared["updates"]
        assert shared["peak_vectors"] <= Sharing(method, 1, 2).vectors
        assert first["curve"][-1]["test_accuracy"] > 0.92  # in the simulator 0.96 to 0.98
        points = sorted(point["epoch"] for report in (first, second) for point in report["curve"])
        assert points == [float(epoch + 1) for epoch in range(epochs)], "whoever begins an epoch looks"
    assert vanish(segments() - before)


# What is refused.

FILES = {
    "good.svm": "1 1:1\n-1 2:1\n" * 20,
    "broken.svm": "1 1:0.5 2:1\n-1 3:x\n",
    "no-label.svm": "1 1:0.5\n\n# a comment\none 2:1\n",
    "column.svm": "1 1:1\n-1 2:1\n1 -3:1\n",
    "nan.svm": "1 1:nan\n-1 2:1\n",
    "three.svm": "1 1:1\n2 1:1\n3 1:1\n",
    "one.svm": "1 1:1\n1 2:1\n",
    "strange.svm": "1 1:1\n5 2:1\n",
    "short.svm": "1 1:1\n-1 2:1\n",
    "empty.svm": "",
    "blank.svm": " \n\n",
    "comments.svm": "# nothing\n",
    "broken.txt": "1 2 3\n1 2 5\n1 two 3\n",
    "half.txt": "1 2 3\n1.5 2 3\n",
    "two.txt": "1 2\n",
    "empty.txt": "",
    "own.py": (
        "import torch, hocket\n"
        "data = torch.zeros(64, 2).double(), torch.zeros(64, dtype=torch.long)\n"
        "wide = hocket.Task(model=lambda: torch.nn.Linear(2, 2).double(), data=(data, data), batch=4, epochs=1)\n"
    ),
}
DIGITS = ["train", "digits", "--steps", "2", "--strategy"]
LOGISTIC = ["train", "logistic", "--strategy", "hogwild", "--data"]
RATINGS = ["train", "factorization", "--strategy", "leashed", "--data"]
NO_MOMENTUM = "hold no momentum, which would change everything; use --momentum 0"

CASES = [
    (["train", "logistic", "--strategy", "hogwild", "--momentum", "0.9"], NO_MOMENTUM),
    (["train", "svm", "--strategy", "leashed", "--momentum", "0.5"], NO_MOMENTUM),
    (["train", "factorization", "--strategy", "mutex", "--momentum", "0.9"], NO_MOMENTUM),
    pytest.param(
        ["train", "logistic", "--strategy", "rwlock", "--momentum", "0.9", "--engine", "threads"], NO_MOMENTUM,

    ),
    ([*DIGITS, "leashed:persistence=-1"], "persistence must be 0, 1, 2, ... or inf; got -1"),
    ([*DIGITS, "leashed:persistence=1.5"], "persistence must be 0, 1, 2, ... or inf; got 1.5"),
    ([*DIGITS, "leashed:persistence=nan"], "persistence must be finite"),
    ([*DIGITS, "leashed:persistence=often"], "persistence must be a number"),
    ([*DIGITS, "leashed:persistence=1e30"], "persistence must be from 0 to 1000000000, or inf"),
    ([*DIGITS, "hogwild:every=10000000000000000000"], "every must be less than 2**63"),
    ([*DIGITS, "hogwild:every=0"], "every must be from 1 to 1000000000, got 0"),
    ([*DIGITS, "mutex", "--hosts", "a:2,b:2"], "mutex shares memory, which is on one machine; leave --hosts out"),
    ([*DIGITS, "mutex:persistence=1"], "no option of strategy mutex is called 'persistence'"),
    ([*DIGITS, "mutex:backoff_us=0"], "0.001 <= backoff_us <= backoff_max_us"),
    ([*DIGITS, "mutex:backoff_us=1e-9"], "0.001 <= backoff_us"),
    ([*DIGITS, "allreduce", "--engine", "sim", "--hosts", "a,b"], "--hosts has no meaning on engine sim"),
    ([*DIGITS, "rwlock:backoff_us=-1"], "0.001 <= backoff_us <= backoff_max_us"),
    ([*DIGITS, "leashed:backoff_us=5000"], "0.001 <= backoff_us <= backoff_max_us"),
    ([*DIGITS, "leashed:backoff_max_us=2e6"], "backoff_max_us < 1000000"),
    ([*DIGITS, "mutex:backoff=wait"], "must be one of none, constant, exponential, yield"),
    ([*DIGITS, "hogwild:stale=gapp"], "must be one of none, inverse, max1"),
    ([*DIGITS, "mutx"], "did you mean mutex?"),
    ([*DIGITS, "mutex", "--engine", "sim", "--workers", "40000"], "mutex takes 1 to 32766 workers, got 40000"),
    ([*DIGITS, "leashed", "--engine", "threads", "--workers", "40000"], "leashed takes 1 to 32766 workers"),
    ([*DIGITS, "hogwild", "--sim", "memory=10"], "memory: cannot read '10' as a rate"),
    ([*DIGITS, "hogwild", "--sim", "block=0"], "block must be 1 or more"),
    ([*DIGITS, "mutex", "--test-data", "good.svm"], "task digits has test samples of its own; leave --test-data out"),
    (["train", "logistic", "--strategy", "mutex", "--test-data", "good.svm"], "--test-data goes with --data"),
    ([*LOGISTIC, "broken.svm"], "broken.svm line 2: expected column:value; got '3:x'"),
    ([*LOGISTIC, "no-label.svm"], "no-label.svm line 4: expected a number as the label; got 'one'"),
    ([*LOGISTIC, "column.svm"], "column.svm line 3: expected column:value; got '-3:1'"),
    ([*LOGISTIC, "nan.svm"], "nan.svm line 1: expected column:value; got '1:nan'"),
    ([*LOGISTIC, "three.svm"], "labels must be -1 and 1, 0 and 1, or 1 and 2; this file has 1, 2, 3"),
    ([*LOGISTIC, "one.svm"], "this file has 1"),
    ([*LOGISTIC, "short.svm"], "short.svm has only 2 rows, too few to hold some out"),
    ([*LOGISTIC, "empty.svm"], "empty.svm is empty"),
    ([*LOGISTIC, "blank.svm"], "blank.svm is empty"),
    ([*LOGISTIC, "comments.svm"], "comments.svm has only comments"),
    ([*LOGISTIC, "gone.svm"], "there is no file gone.svm"),
    ([*LOGISTIC, "."], "is a directory; name a file"),
    ([*LOGISTIC, "good.svm", "--test-data", "strange.svm"], "strange.svm has the label 5, which good.svm does not"),
    ([*LOGISTIC, "good.svm", "--test-data", "broken.svm"], "broken.svm line 2"),
    ([*LOGISTIC, "good.svm", "--test-data", "empty.svm"], "empty.svm is empty"),
    ([*LOGISTIC, "good.svm", "--workers", "33"], "33 workers cannot share 32 samples"),
    (["train", "svm:l2=-1", "--strategy", "hogwild"], "l2 must be 0 or more"),
    ([*RATINGS, "broken.txt"], "broken.txt line 3: expected user item rating"),
    ([*RATINGS, "half.txt"], "half.txt line 2: expected user item rating, with whole numbers for user and item"),
    ([*RATINGS, "two.txt"], "two.txt line 1: expected user item rating"),
    ([*RATINGS, "empty.txt"], "empty.txt is empty"),
    (["train", "factorization", "--test-data", "broken.txt"], "--test-data goes with --data"),
    pytest.param(
        ["train", "own.py:wide", "--strategy", "hogwild", "--engine", "threads"],
        "strategy hogwild shares float32 parameters in main memory; got float64",
    ),
    pytest.param(
        ["train", "own.py:wide", "--strategy", "hogwild", "--engine", "threads", "--test-data", "good.svm"],
        "brings its own data; leave --data and --test-data out",
    ),
    pytest.param(
        [*DIGITS, "mutex", "--device", "cuda"], "PyTorch sees no GPU here; use --device cpu",
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("args", "fragment"), CASES)
def test_refused(
    args: list[str],
    fragment: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line, exit status 2, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Path(name).write_text(content)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr("hocket.engines.mpi.available", lambda: "not in this test")
    status = cli.run(args)
    printed = capsys.readouterr()
    assert status == 2, printed.err
    assert printed.out == ""
    assert printed.err.startswith("hocket: ") and printed.err.endswith("\n")
    assert printed.err.count("\n") == 1, printed.err
    assert fragment in printed.err
    assert {path.name for path in Path().rglob("*")} == set(FILES)
