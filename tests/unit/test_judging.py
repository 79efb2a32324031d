"""Which samples are judged by what, what is kept of it, and who hears how training goes."""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file
from tiny import fit
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import hocket
from hocket.app import cli
from hocket.core.errors import UserError
from hocket.drivers.held_back import held_back
from hocket.run.spec import RunSpec
from hocket.run.train import prepare
from hocket.tasks import Progress, Task

STRATEGIES = ["allreduce", "local-sgd:every=3", "server:mode=async", "hogwild", "gossip:kind=adpsgd", "elastic"]
NAMED = tiny.task(40, validation=0.25, epochs=2)


def right(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(-1) == target).float().mean()


def wrong(output: Tensor, target: Tensor) -> Tensor:
    return 1 - right(output, target)


def accuracy_of(state: dict[str, Tensor], samples: tuple[Tensor, Tensor]) -> float:
    model = tiny.model()
    model.load_state_dict(state)
    return float(right(model(samples[0]), samples[1]))


class TestValidation:
    @pytest.mark.parametrize("strategy", STRATEGIES)
    @pytest.mark.parametrize("engine", ["threads", "sim"])
    def test_is_what_the_curve_shows_and_the_test_comes_once(self, strategy: str, engine: str) -> None:
        made = tiny.task(40, validation=0.25, lr=0.5)
        result = fit(made, strategy=strategy, engine=engine, epochs=2, workers=2)
        assert result.looks_at == "validation"
        assert all({"validation_loss", "validation_accuracy"} <= point.keys() for point in result.curve)
        assert not any(key.startswith("test") for point in result.curve for key in point)
        assert result.test_metric == pytest.approx(accuracy_of(result.state, tiny.samples(12)), abs=1e-6)
        kept = prepare(RunSpec("", validation=0.25, engine="threads"), made)
        _, judged = held_back(kept.plan, made, kept.given)
        assert judged is not None
        samples = judged.take(torch.arange(len(judged)))
        assert result.validation_metrics["accuracy"] == pytest.approx(accuracy_of(result.state, samples), abs=1e-6)
        assert result.curve[-1]["samples"] == 60, "what is kept back is not trained on"

    @pytest.mark.parametrize(
        ("strategy", "engine"),
        [
            *itertools.product(["allreduce", "server:mode=async", "hogwild"], ["threads", "sim"]),
            ("allreduce", "fleet"),
        ],
    )
    def test_training_samples_are_judged_in_the_end_on_request(self, strategy: str, engine: str) -> None:
        made = tiny.task(40, lr=0.5)
        settings: dict[str, Any] = dict(strategy=strategy, engine=engine, epochs=2, workers=2)
        without, result = fit(made, **settings), fit(made, **settings, train_metrics=True)
        assert not without.train_metrics and "train_accuracy" not in without.to_json()
        wanted = accuracy_of(result.state, tiny.samples(40))
        assert result.to_json()["train_accuracy"] == pytest.approx(wanted, abs=1e-6)
        assert result.train_loss == result.curve[-1]["train_loss"], "of the way there, as ever"
        if engine != "threads":
            assert result.curve == without.curve and result.test_metric == without.test_metric

    def test_in_fresh_processes(self) -> None:
        found, wanted = (fit(NAMED, engine=engine) for engine in ("torch", "threads"))
        for name in ("looks_at", "test_loss", "validation_loss", "metrics", "validation_metrics"):
            assert getattr(found, name) == pytest.approx(getattr(wanted, name)), name

    @pytest.mark.parametrize("dataset", [False, True])
    def test_a_share_is_drawn_by_the_seed(self, dataset: bool) -> None:
        x = torch.arange(20.0).reshape(20, 1)
        samples: Any = TensorDataset(x, x[:, 0].long()) if dataset else (x, x[:, 0].long())
        made = Task(lambda: nn.Linear(1, 20), (samples, samples), batch=2, validation=0.3)
        found = []
        for seed in (0, 0, 1):
            training = prepare(RunSpec("", seed=seed, engine="threads"), made)
            parts = held_back(training.plan, made, training.given)
            train, kept = ([int(n) for n in part.take(torch.arange(len(part)))[1]] for part in parts if part)
            assert len(kept) == 6 and sorted(train + kept) == list(range(20))
            found.append(kept)
        assert found[0] == found[1] != found[2]

    @pytest.mark.parametrize("given", [tiny.samples(9), TensorDataset(*tiny.samples(9)), lambda: tiny.samples(9)])
    def test_samples_of_its_own(self, given: Any) -> None:
        result = fit(tiny.task(24, validation=given))
        wanted = accuracy_of(result.state, tiny.samples(9))
        assert result.validation_metrics["accuracy"] == pytest.approx(wanted, abs=1e-6)
        with pytest.raises(UserError, match="brings validation samples of its own; leave --validation out"):
            fit(tiny.task(24, validation=given), validation=0.1)

    def test_the_target_looks_at_it(self) -> None:
        """The test targets are wrong on purpose: nothing could be reached there."""
        x, y = tiny.samples(48)
        made = Task(tiny.model, ((x, y), (x, 1 - y)), batch=4, epochs=30, lr=0.5, validation=0.25)
        result = fit(made, target=0.9)
        assert result.verdict == "reached-target" and result.epochs < 30
        assert (result.validation_metrics["accuracy"] or 0) >= 0.9 > 0.5 > (result.test_metric or 0)
        assert result.time_to_target == result.curve[-1]["seconds"]

    def test_tuning_looks_at_it(self) -> None:
        x, y = tiny.samples(96)
        made = Task(tiny.model, ((x, y), (x, 1 - y)), batch=4, epochs=8, validation=0.25)
        found = hocket.tune(made, ["lr=0.00001,0.5"], engine="sim", progress=False)
        assert found["best"] == {"lr": 0.5}
        assert all(len(trial["validation_metric"]) for trial in found["trials"])

    def test_on_the_command_line(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        args = ["train", "digits", "--validation", "0.1", "--epochs", "1", "--engine", "threads"]
        assert cli.run([*args, "--out", str(tmp_path / "run")]) == 0
        out = capsys.readouterr().out
        assert "validation accuracy" in out and "test accuracy" in out
        assert "validation = 0.1" in (tmp_path / "run/spec.toml").read_text()
        with (tmp_path / "run/curve.csv").open() as file:
            assert "validation_accuracy" in next(csv.reader(file))
        record = json.loads((tmp_path / "run/result.json").read_text())
        assert record["looks_at"] == "validation" and {"test_accuracy", "validation_accuracy"} <= record.keys()

    def test_compiled_workers_have_it_too(self) -> None:
        result = fit("digits", strategy="hogwild", validation=0.1, epochs=2)  # type: ignore[arg-type]
        assert result.driver == "compiled" and result.looks_at == "validation"
        assert (result.test_metric or 0) > 0.5 and (result.validation_metrics["accuracy"] or 0) > 0.5

    @pytest.mark.parametrize("share", [1.0, -0.1, 5])
    def test_refused(self, share: float) -> None:
        with pytest.raises(UserError, match="validation must be a share from 0 to below 1"):
            fit(tiny.task(), validation=share)
        with pytest.raises(UserError, match=r"Task\.validation must be samples, or a share"):
            tiny.task(validation=share)


class TestMetrics:
    def test_all_are_told_and_the_first_counts(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        made = tiny.task(metrics={"wrong": wrong, "right": right}, lower_is_better=True, epochs=30, lr=0.5)
        result = fit(made, target=0.2, out=tmp_path / "run")
        assert result.metric == "wrong" and result.verdict == "reached-target"
        assert all(p["test_wrong"] == pytest.approx(1 - p["test_right"]) for p in result.curve)
        assert result.metrics == {"wrong": result.test_metric, "right": pytest.approx(1 - (result.test_metric or 0))}
        record = json.loads((tmp_path / "run/result.json").read_text())
        assert record["test_right"] == result.metrics["right"] and record == result.to_json()
        from hocket.app.summary import summary

        summary(result)
        out = capsys.readouterr().out
        assert "test wrong" in out and "test right" in out

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_what_is_no_mean_over_samples(self, strategy: str) -> None:
        """Seen by one worker, in one piece, in eval mode and without gradients."""

        def evaluate(model: nn.Module, samples: Any) -> dict[str, float]:
            assert not model.training and not torch.is_grad_enabled() and len(samples[0]) == 12
            return {"spread": float(model(samples[0]).std()), "count": 12}

        made = tiny.task(evaluate=evaluate, metric_name="spread", epochs=2)
        result = fit(made, strategy=strategy, engine="sim", target=0.0)
        assert result.verdict == "reached-target" and result.metrics["count"] == 12
        model = tiny.model()
        model.load_state_dict(result.state)
        assert result.test_metric == pytest.approx(float(model(tiny.samples(12)[0]).std()), abs=1e-6)

    def test_both(self) -> None:
        result = fit(tiny.task(metrics={"right": right}, evaluate=lambda model, samples: {"n": len(samples[0])}))
        assert result.metric == "right" and set(result.metrics) == {"right", "n"}

    @pytest.mark.parametrize(
        ("settings", "line"),
        [
            (dict(metrics={}), "Task.metrics must be functions by name"),
            (dict(metrics={"a": 1}), "Task.metrics must be functions by name"),
            (dict(metrics=[right]), "Task.metrics must be functions by name"),
            (dict(metrics={"loss": right}), "none may be 'loss'"),
            (dict(metrics={"a": right}, metric=wrong), "takes the place of metric and metric_name"),
            (dict(metrics={"a": right}, metric_name="b"), "takes the place of metric and metric_name"),
            (dict(evaluate=5), "Task.evaluate must be a function, or None"),
            (dict(on_step="x"), "Task.on_step must be a function, or None"),
            (dict(schedule=5), "Task.schedule must be text"),
            (dict(validation="most"), "Task.validation must be samples, or a share"),
        ],
    )
    def test_refused(self, settings: dict[str, Any], line: str) -> None:
        with pytest.raises(UserError, match=line) as caught:
            tiny.task(**settings)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("found", "line"),
        [
            (0.5, "must return numbers by name"),
            ({"b": 1}, "must give 'a'"),
            ({"a": "x"}, "must return numbers by name"),
        ],
    )
    def test_what_evaluate_must_not_give(self, found: Any, line: str) -> None:
        with pytest.raises(hocket.RankFailed, match=f"Task.evaluate {line}"):
            fit(tiny.task(evaluate=lambda model, samples: found, metric_name="a"))

    def test_one_that_gives_no_number_is_named(self) -> None:
        with pytest.raises(UserError, match=r"Task.metrics\['b'\] must return one number"):
            fit(tiny.task(metrics={"a": right, "b": lambda output, target: output}))


class TestBest:
    SPOILT = "multi-step:milestones=2,gamma=100000"
    """Trains well for two epochs, and then ruins what it has."""

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_is_kept_beside_the_last(self, strategy: str, tmp_path: Path) -> None:
        made = tiny.task(48, lr=0.5, schedule=self.SPOILT)
        result = fit(made, strategy=strategy, epochs=4, engine="sim", out=tmp_path / "run")
        metrics = [point["test_accuracy"] for point in result.curve]
        first = metrics.index(max(metrics))
        assert result.best is not None
        assert (result.best["metric"], result.best["epoch"]) == (max(metrics), result.curve[first]["epoch"])
        best = load_file(tmp_path / "run/best.safetensors")
        assert accuracy_of(best, tiny.samples(12)) == pytest.approx(max(metrics), abs=1e-6)
        assert all(best[name].equal(result.best_state[name]) for name in best)

    def test_is_the_model_of_that_moment(self) -> None:
        made = tiny.task(48, lr=0.5, schedule=self.SPOILT, metric=lambda output, target: -output.abs().mean())
        best, short = fit(made, epochs=4), fit(made, epochs=1)
        assert best.best is not None and best.best["epoch"] == 1
        assert all(best.best_state[name].equal(short.state[name]) for name in short.state)

    def test_goes_on_with_a_run(self, tmp_path: Path) -> None:
        made = tiny.task(48, lr=0.5, schedule=self.SPOILT)
        before = fit(made, epochs=2, out=tmp_path / "run", checkpoint_every=1)
        content = (tmp_path / "run/best.safetensors").read_bytes()
        after = hocket.resume(tmp_path / "run", task=made, epochs=4, progress=False)
        assert max(p["test_accuracy"] for p in after.curve) == (before.best or {})["metric"]
        assert after.best == before.best and (tmp_path / "run/best.safetensors").read_bytes() == content

    def test_by_the_lowest_where_that_is_better(self) -> None:
        result = fit(tiny.task(metrics={"wrong": wrong}, lower_is_better=True, epochs=4, lr=0.5))
        assert (result.best or {})["metric"] == min(point["test_wrong"] for point in result.curve)


class TestCallbacks:
    @pytest.mark.parametrize("strategy", STRATEGIES)
    @pytest.mark.parametrize("engine", ["threads", "sim"])
    def test_every_worker_hears_of_every_epoch_and_of_its_steps(self, strategy: str, engine: str) -> None:
        epochs: dict[int, list[float]] = {0: [], 1: []}
        steps: list[Progress] = []
        made = tiny.task(24, on_epoch=lambda p: epochs[p.worker].append(p.epoch), on_step=steps.append, epochs=3)
        result = fit(made, strategy=strategy, engine=engine, workers=2)
        assert result.driver == "pytorch"
        assert epochs == {0: [1, 2, 3], 1: [1, 2, 3]}
        assert len(steps) == 18 and {p.worker for p in steps} <= {0, 1}
        assert all(p.lr == 0.1 and p.workers == 2 and isinstance(p.model, nn.Linear) for p in steps)

    def test_who_goes_in_step_hears_what_was_found(self) -> None:
        seen: list[Progress] = []
        made = tiny.task(24, on_epoch=seen.append, epochs=2)
        result = fit(made, workers=2)
        assert [dict(p.judged) for p in seen if p.worker == 0] == result.curve
        assert [p.loss for p in seen if p.worker == 0] == [point["train_loss"] for point in result.curve]

    def test_epochs_that_were_told_are_not_told_again(self, tmp_path: Path) -> None:
        seen: list[float] = []
        made = tiny.task(24, on_epoch=lambda p: seen.append(p.epoch))
        fit(made, workers=1, epochs=2, checkpoint_every=1, out=tmp_path / "run")
        hocket.resume(tmp_path / "run", task=made, epochs=4, progress=False)
        assert seen[:2] == [1, 2] and seen[-2:] == [3, 4] and len(seen) <= 5

    def test_a_mistake_in_one_ends_the_run(self) -> None:
        def fails(progress: Progress) -> None:
            raise ZeroDivisionError("planted")

        with pytest.raises(hocket.RankFailed, match="ZeroDivisionError: planted"):
            fit(tiny.task(24, on_epoch=fails))
