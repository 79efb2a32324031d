"""`hocket.fit` and the Result."""

from __future__ import annotations

import json
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from tiny import fit
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import hocket
from hocket.run import loading
from hocket.run.spec import RunSpec, read_toml

NAMED = tiny.task()


def same_state(a: hocket.Result, b: hocket.Result) -> bool:
    return a.state.keys() == b.state.keys() and all(torch.equal(a.state[k], b.state[k]) for k in a.state)


class TestTask:
    def test_an_object_without_a_name(self) -> None:
        result = fit(tiny.task(), workers=2)
        assert (result.task, result.engine, result.strategy, result.workers) == ("task", "threads", "allreduce", 2)
        assert (result.verdict, result.steps, result.epochs) == ("finished", 3, 1)

    def test_an_object_at_the_top_of_a_file_has_a_name(self) -> None:
        assert fit(NAMED).task == f"{Path(__file__).resolve()}:NAMED"

    def test_a_name(self) -> None:
        result = hocket.fit("digits", engine="threads", steps=3, progress=False)
        assert (result.task, result.steps, result.parameters) == ("digits", 3, 64 * 64 + 64 + 64 * 10 + 10)

    def test_fresh_processes_need_a_name(self) -> None:
        with pytest.raises(ValueError, match=r"path/to/file\.py:task.*engine='threads'"):
            fit(tiny.task(), engine="torch")

    def test_datasets_are_tensors_one_by_one(self) -> None:
        class Own(Dataset[tuple[Tensor, int]]):
            """As users write them: one sample at a time, the target a number."""

            inputs, targets = tiny.samples(24)

            def __len__(self) -> int:
                return len(self.inputs)

            def __getitem__(self, i: int) -> tuple[Tensor, int]:
                return self.inputs[i], int(self.targets[i])

        tensors = fit(tiny.task(24), workers=3)
        test = TensorDataset(*tiny.samples(12))
        datasets = fit(hocket.Task(model=tiny.model, data=lambda: (Own(), test), batch=4, epochs=1), workers=3)
        assert same_state(tensors, datasets)
        assert datasets.test_loss == tensors.test_loss

    def test_a_model_that_is_given_is_where_training_starts_and_stays_as_it_was(self) -> None:
        model = tiny.model()
        before = model.weight.detach().clone()
        task = hocket.Task(model=model, data=tiny.task().data, batch=4, epochs=1)
        runs = [fit(task, seed=seed, lr=1e-30) for seed in (0, 1)]
        assert torch.equal(model.weight, before) and model.weight.grad is None
        assert all(torch.equal(run.state["weight"], before) for run in runs)

    def test_the_seed_decides(self) -> None:
        assert same_state(fit(tiny.task(), seed=1), fit(tiny.task(), seed=1))
        assert not same_state(fit(tiny.task(), seed=1), fit(tiny.task(), seed=2))

    def test_serial_is_allreduce_alone(self) -> None:
        serial, one = fit(tiny.task(), strategy="serial"), fit(tiny.task(), workers=1)
        assert serial.workers == 1 and serial.bytes_sent == 0
        assert same_state(serial, one)


class TestDefaultEngine:
    @pytest.mark.parametrize(
        ("mpi", "reason"),
        [(None, "the task has no name that fresh processes could find"), ("mpiexec is missing", "mpiexec is missing")],
    )
    def test_falls_back_to_threads_and_says_why(
        self, mpi: str | None, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("hocket.engines.mpi.available", lambda: mpi)
        assert hocket.fit(tiny.task()).engine == "threads"
        assert f"engine threads ({reason})" in capsys.readouterr().err.splitlines()[0]

    def test_sim_options_mean_the_simulator(self) -> None:
        assert fit(tiny.task(), engine=None, sim={"compute": "2ms"}).engine == "sim"


class TestResult:
    def test_json_holds_what_the_issue_asks_for(self, tmp_path: Path) -> None:
        result = fit(tiny.task(target=0.5), out=tmp_path / "run")
        values = json.loads(json.dumps(result.to_json()))
        assert values == json.loads((tmp_path / "run/result.json").read_text())
        assert set(values) >= {
            "task", "strategy", "engine", "workers", "seed", "seconds", "virtual_seconds", "samples_per_s", "steps",
            "epochs", "train_loss", "test_loss", "test_accuracy", "time_to_target", "bytes_sent", "staleness",
            "per_worker", "verdict", "versions",
        }  # fmt: skip
        assert set(values["staleness"]) == {"mean", "max", "histogram"}
        assert {"hocket", "python", "torch", "numpy"} <= set(values["versions"])
        assert "state" not in values and set(result.state) == {"weight", "bias"}

    def test_rates_and_curve(self) -> None:
        result = tiny.simulated(tiny.task(24), {"compute": "2ms"}, workers=2, batch=2, epochs=3)
        assert result.virtual_seconds
        assert result.samples_per_s == pytest.approx(3 * 24 / result.virtual_seconds)
        assert [p["step"] for p in result.curve] == [6, 12, 18] and [p["epoch"] for p in result.curve] == [1, 2, 3]
        assert result.curve[-1]["seconds"] == pytest.approx(result.virtual_seconds)
        assert result.curve[-1]["test_loss"] == result.test_loss

    def test_steps_may_end_within_an_epoch(self) -> None:
        result = fit(tiny.task(24), workers=2, batch=2, steps=8)
        assert (result.steps, result.epochs) == (8, 8 / 6)
        assert [p["step"] for p in result.curve] == [6, 8]

    def test_losses_are_means_over_samples(self) -> None:
        """With a vanishing learning rate the loss of an epoch is that of the first model; 7 samples are uneven."""
        task = tiny.task(7, batch=2)
        result = fit(task, workers=3, lr=1e-30)
        model = task.build_model(0)
        for count, found in ((7, result.train_loss), (12, result.test_loss)):
            x, y = tiny.samples(count)
            assert found == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-5)

    def test_the_folder_holds_the_resolved_spec(self, tmp_path: Path) -> None:
        result = hocket.fit("digits", engine="threads", steps=3, out=tmp_path / "run", progress=False)
        written = RunSpec.from_mapping(read_toml(tmp_path / "run/spec.toml"))
        assert (written.batch, written.lr, written.momentum, written.workers) == (32, 0.1, 0.9, 2)
        assert result.out == str(tmp_path / "run")
        with pytest.raises(hocket.UserError, match="exists already"):
            hocket.fit("digits", engine="threads", steps=3, out=tmp_path / "run", progress=False)

    def test_without_a_folder_nothing_is_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert fit(tiny.task()).out is None
        assert list(tmp_path.iterdir()) == []


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class TestVerdict:
    def regression(self, **settings: Any) -> hocket.Task:
        x, _ = tiny.samples(24)
        data = (x, 2 * x[:, :1])
        return hocket.Task(
            model=lambda: nn.Linear(4, 1), data=(data, data), loss=squared, metric=squared, metric_name="mse",
            lower_is_better=True, batch=4, **settings,
        )  # fmt: skip

    def test_lower_is_better(self) -> None:
        result = fit(self.regression(epochs=50), workers=2, target=0.5)
        assert result.verdict == "reached-target" and result.epochs < 50
        *before, last = [p["test_mse"] for p in result.curve]
        assert all(value > 0.5 for value in before) and last <= 0.5
        assert result.to_json()["test_mse"] == result.test_metric == last
        assert result.time_to_target == result.curve[-1]["seconds"]

    def test_a_tasks_own_target_is_timed_but_does_not_stop(self) -> None:
        result = fit(self.regression(epochs=30, target=0.5), workers=2)
        assert (result.verdict, result.epochs) == ("finished", 30)
        first = next(p for p in result.curve if p["test_mse"] <= 0.5)
        assert result.time_to_target == first["seconds"] < result.curve[-1]["seconds"]

    def test_a_target_that_is_not_reached(self) -> None:
        result = fit(self.regression(epochs=2), target=-1.0)
        assert (result.verdict, result.time_to_target) == ("finished", None)

    @pytest.mark.parametrize("engine", ["threads", "sim"])
    def test_divergence(self, engine: str) -> None:
        result = fit(self.regression(epochs=9), lr=1e30, engine=engine)
        assert (result.verdict, result.epochs) == ("diverged", 1)
        assert result.train_loss is None and result.test_loss is None
        assert result.diverged_at_step is not None and 2 <= result.diverged_at_step <= 3
        json.dumps(result.to_json(), allow_nan=False)

    def test_the_step_of_the_first_bad_loss(self) -> None:
        """Of 13 samples for 3 workers the last step has one, for rank 0. Rank 1's first batch has the bad sample."""
        x, _ = tiny.samples(13)
        bad = int(hocket.core.shard.Shards(13, 3, 2, 0).epoch(0, 1)[0][0])
        y = torch.zeros(13, 1)
        y[bad] = float("inf")
        task = hocket.Task(model=lambda: nn.Linear(4, 1), data=((x, y), (x, x[:, :1])), loss=squared, metric=squared)
        result = fit(task, workers=3, batch=2, epochs=1, strategy="local-sgd:every=100")
        assert result.diverged_at_step == 1


def threads_of_a_new_thread() -> int:
    """PyTorch keeps the number by thread: what ranks that are threads set is seen by those that start later."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


class TestTheCallersPyTorch:
    def noisy(self) -> hocket.Task:
        return hocket.Task(
            model=lambda: nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5)), data=tiny.task().data, batch=4, epochs=1
        )

    @pytest.mark.parametrize("engine", ["threads", "sim"])
    def test_is_as_it_was(self, engine: str) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            state = torch.get_rng_state()
            fit(self.noisy(), engine=engine, workers=2)
            assert torch.equal(torch.get_rng_state(), state)
            assert torch.get_num_threads() == threads_of_a_new_thread() == 3
        finally:
            torch.set_num_threads(before)

    def test_is_as_it_was_after_a_failure(self) -> None:
        def loss(output: Tensor, target: Tensor) -> Tensor:
            torch.rand(1)
            if threading.current_thread() is not threading.main_thread():
                raise ZeroDivisionError("planted")
            return F.cross_entropy(output, target)

        state = torch.get_rng_state()
        with pytest.raises(hocket.RankFailed, match="planted"):
            fit(hocket.Task(model=tiny.model, data=tiny.task().data, batch=4, loss=loss), workers=2)
        assert torch.equal(torch.get_rng_state(), state)

    def test_does_not_decide_what_is_trained(self) -> None:
        torch.manual_seed(1)
        first = fit(self.noisy(), workers=1)
        torch.manual_seed(2)
        assert same_state(first, fit(self.noisy(), workers=1))


SCRIPT = """
import torch, hocket
data = torch.zeros(24, 4), torch.zeros(24, dtype=torch.long)
task = hocket.Task(model=lambda: torch.nn.Linear(4, 2), data=(data, data), batch=4, epochs=1)
result = hocket.fit(task, engine="threads", progress=False)
after = 1
"""


class TestUsersFile:
    @pytest.fixture
    def script(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(sys, "path", list(sys.path))
        (tmp_path / "script.py").write_text(SCRIPT)
        return tmp_path / "script.py"

    def test_loads_as_far_as_its_own_fit(self, script: Path) -> None:
        module = loading.load_file(script, 0)
        assert isinstance(module.task, hocket.Task)
        assert not hasattr(module, "result") and not hasattr(module, "after")
        assert loading.loading is False
        assert loading.load_file(script, 0) is module, "once"

    def test_any_name_of_a_file_will_do(self, script: Path) -> None:
        for name in ("script.v2.py", "my <script>.py"):
            named = script.with_name(name)
            named.write_text("import hocket\n")
            assert loading.load_file(named, 0).__file__ == str(named)

    def test_trains_by_name(self, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(script.parent)
        result = hocket.fit("script.py:task", engine="threads", progress=False)
        assert (result.task, result.steps) == (f"{script}:task", 3), "the same file wherever it is read again"

    def test_the_callers_generators_are_as_they_were(self, script: Path) -> None:
        def states() -> list[Any]:
            return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]

        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(123)
        before = states()
        hocket.fit(f"{script}:task", engine="threads", progress=False)
        assert states() == before


def test_the_public_names_are_what_they_say() -> None:
    for name in set(hocket.__all__) - {"train", "__version__"}:
        assert callable(getattr(hocket, name)), name
