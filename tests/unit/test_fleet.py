"""The engine `fleet` gives what `sim` gives: parameters, virtual time, bytes and losses."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from test_batched import Looks, mlp, norm, parameters, points, task
from tiny import fit

import hocket
from hocket.core.errors import RankFailed, UserError
from hocket.core.worker import Need, Steps, Strategy, Worker, strategy
from hocket.engines.catalogue import engine
from hocket.engines.sim_costs import Draws
from hocket.run.launch import launch
from hocket.run.spec import RunSpec

ABLE = [name for name in strategy if strategy.make(name).needs <= engine["fleet"].offers]
TEXTS = [
    *ABLE,
    "local-sgd:every=3",
    "local-sgd:every=2,momentum=average",
    "local-sgd:every=2,momentum=reset",
    "local-sgd:every=2,post_local=3",
    "diloco:every=3",
]


def both(made: hocket.Task, **settings: Any) -> tuple[hocket.Result, hocket.Result]:
    sim, fleet = (fit(made, **{"engine": name, "seed": 3, "momentum": 0.5} | settings) for name in ("sim", "fleet"))
    return sim, fleet


def agree(sim: hocket.Result, fleet: hocket.Result) -> None:
    torch.testing.assert_close(parameters(fleet), parameters(sim), rtol=1e-4, atol=1e-6)
    assert fleet.virtual_seconds == pytest.approx(sim.virtual_seconds, rel=1e-12)
    assert fleet.bytes_sent == sim.bytes_sent
    assert (fleet.steps, fleet.epochs, fleet.verdict) == (sim.steps, sim.epochs, sim.verdict)
    assert fleet.staleness == sim.staleness
    assert fleet.consensus_distance == pytest.approx(sim.consensus_distance, rel=1e-3, abs=1e-5)
    assert len(fleet.curve) == len(sim.curve)
    for ours, theirs in zip(fleet.curve, sim.curve, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    for ours, theirs in zip(fleet.per_worker, sim.per_worker, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-12)
    assert known(fleet.time_to_loss) == pytest.approx(known(sim.time_to_loss), rel=1e-4)


def known(times: dict[str, float | None] | None) -> dict[str, float]:
    return {part: at_s for part, at_s in (times or {}).items() if at_s is not None}


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("text", TEXTS)
def test_what_sim_gives(text: str, workers: int) -> None:
    """37 samples in batches of 4: the last are uneven, and at 3 workers two get nothing of them."""
    if strategy.make(text).most_workers < workers:
        pytest.skip(f"{text} has fewer workers")
    agree(*both(task(epochs=3), strategy=text, workers=workers))


def test_groups() -> None:
    agree(*both(task(epochs=3), strategy="local-sgd:every=1,group=2,between=3", workers=6))


def test_sixty_four_workers_some_of_them_slow() -> None:
    made = task(count=64 * 4 * 3 + 17, epochs=2)
    agree(*both(made, strategy="local-sgd:every=2", workers=64, sim={"stragglers": "3x2.5", "compute": "2ms"}))


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop", "adamw:weight_decay=0.1"])
def test_other_optimizers(optimizer: str) -> None:
    made = task(count=40)
    agree(*both(made, strategy="local-sgd:every=2", workers=4, optimizer=optimizer, lr=0.01, momentum=None))


SETTINGS: dict[str, dict[str, Any]] = {
    "clipped": dict(clip=0.05),
    "scheduled": dict(schedule="OneCycleLR:max_lr=0.2"),
    "warmed up": dict(warmup=1.0, scale_lr=True),
    "validated": dict(validation=0.3),
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("text", ["allreduce", "local-sgd:every=3"])
def test_other_settings(text: str, settings: str) -> None:
    sim, fleet = both(task(epochs=3), strategy=text, workers=3, **SETTINGS[settings])
    agree(sim, fleet)
    assert fleet.test_metric == pytest.approx(sim.test_metric)


def test_a_task_may_judge_the_whole_model_itself() -> None:
    made = task(evaluate=lambda model, _: {"accuracy": float(next(model.parameters()).sum())})
    agree(*both(made, strategy="local-sgd:every=3", workers=3))


def test_each_replica_is_judged_on_request() -> None:
    sim, fleet = both(task(count=40), strategy="local-sgd:every=3", workers=4, own_metrics=True, steps=5)
    assert [w["own_metric"] for w in fleet.per_worker] == pytest.approx([w["own_metric"] for w in sim.per_worker])


def test_a_target_ends_the_run() -> None:
    sim, fleet = both(task(epochs=50), workers=3, target=0.4)
    assert fleet.verdict == sim.verdict == "reached-target" and fleet.steps == sim.steps


def test_what_blows_up_is_seen() -> None:
    made = task(model=mlp, lr=1e10, loss=lambda out, _: (out**4).sum())
    sim, fleet = both(made, workers=3, momentum=0.0)
    assert fleet.verdict == sim.verdict == "diverged"
    assert fleet.diverged_at_step == sim.diverged_at_step


@dataclass(frozen=True)
class Ranked(Strategy):
    """The first worker steps twice."""

    name = "ranked"

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"collectives"})

    def worker(self, w: Worker) -> Steps:
        while (g := (yield)) is not None:
            w.descend(g)
            if w.rank == 0:
                w.descend(g)


@dataclass(frozen=True)
class Gathers(Ranked):
    """Asks for a collective that needs all vectors side by side."""

    name = "gathers"

    def worker(self, w: Worker) -> Steps:
        while (g := (yield)) is not None:
            w.comm.all_gather(torch.zeros(2), g.vector)


@pytest.mark.parametrize("made", [Ranked, Gathers])
def test_a_strategy_that_it_cannot_run_is_refused_with_the_engine_that_would_do(
    made: type[Strategy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(strategy._classes, made.name, made)
    with pytest.raises((UserError, RankFailed), match="use --engine sim"):
        fit(task(), engine="fleet", strategy=made.name, workers=3)


REFUSALS: dict[str, dict[str, Any]] = {
    "needs messages": dict(strategy="gossip"),
    "needs any-source": dict(strategy="server:mode=async"),
    "layers": dict(optimizer="lars"),
    "checkpoints": dict(checkpoint_every="1"),
    "not compressed": dict(compress="int8"),
    "does not go with accumulate": dict(accumulate=2),
    "does not go with autocast": dict(autocast="bf16"),
    "sends while gradients are computed": dict(strategy="allreduce:overlap=on"),
    "no events for a timeline": dict(timeline=True, out="never"),
    "does not go with layout": dict(layout="tensor=2"),
    "without samples": dict(optimizer="adam", workers=3),
    "one by one": dict(sim={"compute": "measured"}),
    "no option of fleet": dict(sim={"cores": "2"}),
}


@pytest.mark.parametrize("why", REFUSALS)
def test_refusals(why: str) -> None:
    with pytest.raises(UserError, match=why) as refused:
        fit(task(), **{"engine": "fleet", "workers": 4, "momentum": None} | REFUSALS[why])
    assert "\n" not in str(refused.value)


def test_a_model_of_no_worker_is_shown_to_nobody() -> None:
    with pytest.raises(UserError, match=r"Task.on_step and on_epoch; use --engine sim"):
        fit(task(on_step=print), engine="fleet", workers=4)


@pytest.mark.parametrize("model", [norm, Looks])
def test_a_model_that_cannot_be_batched(model: Callable[[], Any]) -> None:
    with pytest.raises(UserError, match=r"engine fleet computes all gradients at once: .*; use --engine sim"):
        fit(task(model, points, 80), engine="fleet", workers=4)


def test_simulator_settings_still_mean_sim() -> None:
    assert fit(task(), engine=None, sim={"compute": "1ms"}, workers=2).engine == "sim"


def test_times_are_drawn_as_python_draws_them() -> None:
    generators = [random.Random(f"0/{r}") for r in range(3)]
    draws = Draws(generators, -1.0, 0.4)
    for _ in range(1000):
        assert draws() == pytest.approx([g.lognormvariate(-1.0, 0.4) for g in generators], rel=1e-14)


def test_a_script_has_no_ranks_to_run_on(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    with pytest.raises(UserError, match="no ranks that could run a script; use --engine sim"):
        launch(str(script), [], RunSpec("", engine="fleet"), module=False, out=tmp_path / "out", force=False)
