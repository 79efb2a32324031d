"""Successive layers on successive ranks: schedules, stages, and what they learn."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from splitting import LIMIT
from test_layouts import TASK, assert_same, doubled, fit, perceptron, task
from torch import Tensor, nn

import hocket
from hocket import UserError
from hocket.layouts.mesh import Layout, Schedule
from hocket.layouts.microbatches import actions, bubble, pieces
from hocket.layouts.pipeline import balanced, costs_of, layers_of, may_end
from hocket.layouts.survey import survey
from hocket.run.spec import RunSpec
from hocket.run.train import prepare

STAGES, BATCHES = st.integers(1, 6), st.integers(1, 12)
IN_STEP = st.sampled_from(["naive", "gpipe", "1f1b"])


@given(schedule=IN_STEP, stages=STAGES, batches=BATCHES)
def test_every_batch_goes_there_and_back_once_and_nobody_waits_for_ever(
    schedule: Schedule, stages: int, batches: int
) -> None:
    """Played through: an action is possible when the neighbour has done its part of it."""
    todo = [actions(schedule, stage, stages, batches) for stage in range(stages)]
    done: set[tuple[int, str, int]] = set()
    for stage, own in enumerate(todo):
        assert sorted(own) == sorted({(way, i) for way in ("there", "back") for i in range(batches)}), stage
    while any(todo):
        before = len(done)
        for stage, own in enumerate(todo):
            while own:
                way, i = own[0]
                needed = (stage - 1, way, i) if way == "there" else (stage + 1, way, i)
                if 0 <= needed[0] < stages and needed not in done:
                    break
                assert way == "there" or (stage, "there", i) in done
                done.add((stage, *own.pop(0)))
        assert len(done) > before


@given(stages=STAGES, batches=BATCHES)
def test_what_is_in_flight(stages: int, batches: int) -> None:
    """Stage 0 holds m micro-batches (GPipe), or min(p, m) (1F1B)."""
    for schedule, expected in (("gpipe", batches), ("1f1b", min(stages, batches))):
        flying = most = 0
        for way, _ in actions(schedule, 0, stages, batches):  # type: ignore[arg-type]
            flying += 1 if way == "there" else -1
            most = max(most, flying)
        assert most == expected


@given(
    costs=st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=8),
    stages=st.integers(1, 4),
)
def test_stages_are_as_even_as_they_can_be(costs: list[tuple[int, bool]], stages: int) -> None:
    def stages_of(ends: tuple[int, ...]) -> list[list[tuple[int, bool]]]:
        return [costs[a:b] for a, b in pairwise([0, *ends])]

    cuts = [(*inner, len(costs)) for inner in combinations(range(1, len(costs)), stages - 1)]
    allowed = [ends for ends in cuts if all(any(trained for _, trained in s) for s in stages_of(ends))]
    found = balanced([float(c) for c, _ in costs], [trained for _, trained in costs], [True] * len(costs), stages)
    if not allowed:
        assert found == []
        return
    best = min(max(sum(c for c, _ in s) for s in stages_of(ends)) for ends in allowed)
    assert tuple(found) in allowed
    assert max(sum(c for c, _ in s) for s in stages_of(tuple(found))) == best


@pytest.mark.parametrize("timed", [False, True])
def test_the_larger_layer_costs_more(timed: bool) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 8), nn.Tanh()), nn.Linear(8, 1024), nn.Linear(1024, 1024))
    layers = layers_of(model, 2)
    assert [layer.path for layer in layers] == ["0.0", "0.1", "1", "2"]
    costs = costs_of(layers, torch.randn(64, 64), timed=timed)
    assert costs[3] == max(costs) > 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def without_norm() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 9), nn.Tanh(), nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 3))
    ).double()


NORMLESS = hocket.Task(model=without_norm, data=(doubled(), doubled()), batch=8, epochs=2, momentum=0.9, lr=0.05)


@pytest.mark.parametrize(
    "layout",
    [
        "pipeline=2",
        "pipeline=3,schedule=gpipe,microbatches=3",
        "pipeline=2,microbatches=5,stages=3+3",
        "pipeline=4,microbatches=2",
        "pipeline=2,tensor=2",
        "pipeline=2,data=2,microbatches=4",
        "pipeline=3,tensor=2,microbatches=3",
    ],
)
def test_a_pipeline_learns_as_one_process_does(layout: str) -> None:
    common: dict[str, Any] = {"engine": "threads", "progress": False}
    alone = hocket.fit(NORMLESS, workers=2 if "data" in layout else 1, **common)
    assert_same(hocket.fit(NORMLESS, layout=layout, **common), alone)


@settings(max_examples=10)
@given(
    ranks=st.sampled_from([2, 3, 4, 6]),
    dtype=st.sampled_from(list(LIMIT)),
    widths=st.lists(st.integers(1, 9), min_size=6, max_size=8),
    batch=st.integers(1, 11),
    batches=st.integers(1, 5),
    schedule=IN_STEP,
)
def test_one_step_is_that_of_one_process(
    ranks: int, dtype: torch.dtype, widths: list[int], batch: int, batches: int, schedule: Schedule
) -> None:
    """At a rate of 1 the weights move by the gradient."""

    def made() -> nn.Module:
        layers = [(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise([5, *widths, 3])]
        return nn.Sequential(*(layer for pair in layers for layer in pair)).to(dtype)

    x, y = doubled()
    data = (x[:batch].to(dtype), y[:batch])
    chosen = hocket.Task(model=made, data=(data, data), batch=batch, lr=1.0, momentum=0.0)
    common: dict[str, Any] = {"engine": "threads", "progress": False, "steps": 1}
    alone = hocket.fit(chosen, workers=1, **common)
    found = hocket.fit(chosen, layout=f"pipeline={ranks},schedule={schedule},microbatches={batches}", **common)
    assert_same(found, alone, LIMIT[dtype])


def test_one_batch_in_flight_is_exact_with_batch_norm_too() -> None:
    assert_same(fit("pipeline=3,schedule=naive"), fit("", workers=1))


def test_batch_norm_never_gets_a_single_sample() -> None:
    """It refuses to take the spread of one; eight micro-batches of seven samples would be single ones."""
    layout = "pipeline=2,stages=3+3"
    told = sum(layer.sent for layer in survey(perceptron(), Layout.parse(layout), doubled()[0][:7]))
    found = hocket.fit(task(batch=7), layout=layout, engine="threads", progress=False, steps=5)
    assert (found.steps, found.bytes_sent) == (5, 5 * told)
    assert (pieces("1f1b", 2, 0, 7, 2), pieces("1f1b", 2, 0, 1, 2)) == (3, 1)


@pytest.mark.parametrize(("layout", "notes"), [("pipeline=2", 1), ("pipeline=2,schedule=naive", 0), ("tensor=2", 0)])
def test_who_splits_batches_of_batch_norm_is_told(layout: str, notes: int) -> None:
    training = prepare(RunSpec("", engine="threads", layout=layout), task())
    assert [note[:36] for note in training.notes] == ["BatchNorm goes by each micro-batch, "] * notes


def test_a_run_goes_on_with_other_stages(tmp_path: Any) -> None:
    options: dict[str, Any] = {"engine": "threads", "progress": False, "checkpoint_every": 1, "out": tmp_path / "run"}
    hocket.fit(TASK, layout="pipeline=3,schedule=naive", epochs=1, **options)
    again = hocket.resume(
        tmp_path / "run", epochs=2, layout="pipeline=2,tensor=2,schedule=naive", workers=4, progress=False
    )
    assert_same(again, fit("", workers=1))


def attending() -> nn.Module:
    block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(5, 8), nn.Unflatten(1, (2, 4)), block, nn.Flatten(), nn.Linear(8, 3)).double()


def test_simulated_ranks_with_shares_of_stages() -> None:
    """They count the operations of their layers in turns, in the middle of each other's."""
    common: dict[str, Any] = {"engine": "sim", "progress": False, "epochs": 1}
    found = hocket.fit(task(model=attending), layout="pipeline=2,tensor=2,data=2,microbatches=3", **common)
    assert_same(found, hocket.fit(task(model=attending), workers=2, **common))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [2, 3])
def test_the_bubble_is_that_of_the_formula(schedule: str, stages: int) -> None:
    """Stages of one cost, messages that take no time."""
    found = hocket.fit(
        NORMLESS, layout=f"pipeline={stages},schedule={schedule},microbatches=4", engine="sim", progress=False,
        sim={"compute": "12ms", "latency": "0us", "bandwidth": "1000000Gbit"},
    )  # fmt: skip
    for stage, measured in enumerate(found.pipeline):
        assert measured["bubble"] == pytest.approx(bubble(stages, 4), abs=3e-3)  # the last step has none behind it
        assert measured["in_flight"] == (4 if schedule == "gpipe" else min(stages - stage, 4))
    assert found.virtual_seconds == pytest.approx(60 * 12e-3 / stages / (1 - bubble(stages, 4)), rel=5e-3)


@pytest.mark.parametrize("layout", ["pipeline=2,stages=4+2", "pipeline=2,tensor=2,stages=2+4,microbatches=3"])
def test_a_pipeline_sends_the_bytes_that_were_told_beforehand(layout: str) -> None:
    told = sum(layer.sent for layer in survey(without_norm(), Layout.parse(layout).over(None), doubled()[0][:8]))
    assert told > 0
    made = hocket.fit(NORMLESS, layout=layout, engine="threads", progress=False, steps=6)
    assert made.bytes_sent == 6 * told


def assert_learns_as_one_process(model: Callable[[], nn.Module], layout: str) -> None:
    made = task(model=model)
    alone = hocket.fit(made, strategy="serial", workers=1, engine="threads", progress=False)
    assert_same(hocket.fit(made, layout=layout, engine="threads", progress=False), alone)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(inplace=True), nn.Linear(5, 5), nn.Linear(5, 9), nn.Linear(9, 3))
    model[2].weight = model[0].weight
    return model.double()


def test_layers_that_share_a_parameter_are_in_one_stage() -> None:
    assert may_end(layers_of(tied(), 2)) == [False, False, True, True, True]
    assert_learns_as_one_process(tied, "pipeline=2,microbatches=2")
    with pytest.raises(UserError, match=r"pipeline=4: layers that share a parameter must be in one stage, which"):
        hocket.fit(task(model=tied), layout="pipeline=4", engine="threads", progress=False)


@pytest.mark.parametrize("stages", ["", ",stages=1+4"])
def test_layers_that_work_in_place(stages: str) -> None:
    def in_place() -> nn.Module:
        return nn.Sequential(
            nn.Linear(5, 12), nn.ReLU(inplace=True), nn.Linear(12, 9), nn.ReLU(inplace=True), nn.Linear(9, 3)
        ).double()

    assert_learns_as_one_process(in_place, f"pipeline=2,microbatches=3{stages}")


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Sum(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


def test_stages_send_each_other_one_tensor() -> None:
    made = task(model=lambda: nn.Sequential(nn.Linear(5, 4), Pair(), Sum(), nn.Linear(4, 3)).double())
    with pytest.raises(UserError, match=r"pipeline=2: 1 \(Pair\) gives a tuple, and stages send each other one tensor"):
        hocket.fit(made, layout="pipeline=2", engine="threads", progress=False)


def with_one_activation() -> nn.Module:
    tanh = nn.Tanh()
    return nn.Sequential(nn.Linear(5, 12), tanh, nn.Linear(12, 9), tanh, nn.Linear(9, 3)).double()


@pytest.mark.parametrize("layout", ["pipeline=2,stages=2+3", "pipeline=3,stages=2+2+1"])
def test_one_activation_may_stand_in_several_places(layout: str) -> None:
    layers = survey(with_one_activation(), Layout.parse(layout), doubled()[0][:8])
    made = hocket.fit(task(model=with_one_activation), layout=layout, engine="threads", progress=False, steps=2)
    assert made.bytes_sent == 2 * sum(layer.sent for layer in layers) > 0
    assert {layer.name: layer.how for layer in layers if layer.sent}["1"] == "stage 1"


@pytest.mark.parametrize(
    ("layout", "line"),
    [
        ("pipeline=5", "pipeline=5: the model has 4 layers with parameters"),
        ("pipeline=2,stages=3+2", r"stages=3\+2 is 2 stages of 5 layers; pipeline=2 needs 2 of 6"),
        ("pipeline=2,stages=3+x", "stages must be numbers of layers"),
        ("pipeline=2,schedule=zigzag", "must be one of naive, gpipe, 1f1b"),
        ("tensor=2,microbatches=3", "microbatches and stages are a pipeline's"),
        ("pipeline=2,domain=2", "domain goes with data"),
    ],
)
def test_bad_pipelines_are_refused_in_one_line(layout: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        fit(layout)


def test_a_model_without_an_order_is_refused() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = perceptron()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layer(x)
            return y

    with pytest.raises(UserError, match=r"pipeline=2: a Own does not say in which order .* use tensor=2"):
        layers_of(Own(), 2)


def test_naive_is_one_batch() -> None:
    assert pieces("naive", 3, 5, 32) == 1
    assert pieces("1f1b", 3, 0, 32) == 12
    assert pieces("gpipe", 3, 50, 32) == 32


def test_the_bytes_of_both_axes_add_up() -> None:
    """1.5D on P_r x P_c (Gholami 2018): each replica's tensor parallelism, and 2 (P_c - 1) of each rank's weights."""
    told = sum(layer.sent for layer in survey(without_norm(), Layout.parse("tensor=2"), doubled()[0][:8]))
    twice = 9 + 3  # biases behind sums, which both ranks of a model have
    weights = sum(p.numel() for p in without_norm().parameters()) + twice
    found = hocket.fit(NORMLESS, layout="tensor=2,data=2", engine="threads", progress=False, steps=10)
    assert found.bytes_sent == 10 * (2 * told + 2 * (2 - 1) * weights * 8)


def test_no_rank_measures_its_layers_while_another_makes_its_model() -> None:
    """Ranks that are threads have one generator among them."""

    def slowly() -> nn.Module:
        first = nn.Linear(5, 4)
        time.sleep(0.05)
        return nn.Sequential(first, nn.Linear(4, 3)).double()

    common: dict[str, Any] = {"engine": "threads", "progress": False, "epochs": 1}
    slow = hocket.Task(model=slowly, data=TASK.data, batch=8, lr=0.05)
    assert_same(hocket.fit(slow, layout="pipeline=2,data=3", **common), hocket.fit(slow, workers=3, **common))
