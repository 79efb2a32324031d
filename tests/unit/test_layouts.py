"""Training with a model that is split over ranks, alone and together with data parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from splitting import apart
from tiny import three_classes
from torch import Tensor, nn

import hocket
from hocket import UserError
from hocket.layouts.mesh import Layout
from hocket.layouts.survey import survey


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 3)
    ).double()


def doubled() -> tuple[Tensor, Tensor]:
    x, y = three_classes()
    return x.double(), y


def task(**settings: Any) -> hocket.Task:
    chosen = {"model": perceptron, "batch": 8, "epochs": 2, "momentum": 0.9, "lr": 0.05} | settings
    return hocket.Task(data=(doubled(), doubled()), **chosen)


TASK = task()
"""At the top level, where `resume` finds it again."""


def fit(layout: str, strategy: str = "allreduce", **settings: Any) -> hocket.Result:
    chosen = {"engine": "threads", "progress": False, "layout": layout, "strategy": strategy} | settings
    return hocket.fit(task(), **chosen)


def assert_same(a: hocket.Result, b: hocket.Result, limit: float = 1e-9) -> None:
    assert a.state.keys() == b.state.keys()
    for name, tensor in a.state.items():
        assert apart(tensor.double(), b.state[name].double()) < limit
    assert a.curve[-1]["test_loss"] == pytest.approx(b.curve[-1]["test_loss"], rel=limit)
    assert [point["step"] for point in a.curve] == [point["step"] for point in b.curve]


@pytest.mark.parametrize("layout", ["tensor=2", "tensor=3"])
@pytest.mark.parametrize("engine", ["threads", "sim"])
def test_a_split_model_learns_as_one_process_does(layout: str, engine: str) -> None:
    alone = fit("", "serial", workers=1, engine=engine)
    assert alone.steps == 60
    found = fit(layout, engine=engine)
    assert_same(found, alone)
    assert (found.parameters, found.layout) == (alone.parameters, layout)
    assert found.workers == int(layout[-1])


@pytest.mark.parametrize("strategy", ["allreduce", "local-sgd:every=3", "diloco:every=3", "gossip"])
def test_a_strategy_works_on_the_data_axis(strategy: str) -> None:
    assert_same(fit("tensor=2,data=2", strategy), fit("", strategy, workers=2))


def test_a_run_goes_on_with_another_mesh(tmp_path: Path) -> None:
    without = fit("", "local-sgd:every=3", workers=2, epochs=3)
    common: dict[str, Any] = {"progress": False, "engine": "threads"}
    settings: dict[str, Any] = common | {"strategy": "local-sgd:every=3", "checkpoint_every": 1}
    hocket.fit(TASK, out=tmp_path / "run", layout="tensor=2,data=2", epochs=1, **settings)
    hocket.resume(tmp_path / "run", epochs=2, layout="tensor=3", workers=6, progress=False)
    last = hocket.resume(tmp_path / "run", epochs=3, layout="", workers=2, progress=False)
    assert_same(last, without)


def test_the_first_rank_has_everyones_bytes_when_a_run_goes_on(tmp_path: Path) -> None:
    whole = hocket.fit(TASK, layout="tensor=2", epochs=2, engine="threads", progress=False)
    options: dict[str, Any] = {"out": tmp_path / "run", "engine": "threads", "progress": False, "checkpoint_every": 1}
    hocket.fit(TASK, layout="tensor=2", epochs=1, **options)
    assert hocket.resume(tmp_path / "run", epochs=2, progress=False).bytes_sent == whole.bytes_sent


def test_replicas_are_as_far_apart_as_those_in_one_piece() -> None:
    one, split = (fit(layout, "local-sgd:every=7", workers=None if layout else 2) for layout in ("", "tensor=2,data=2"))
    assert one.consensus_distance
    assert split.consensus_distance == pytest.approx(one.consensus_distance, rel=1e-9)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"layout": "tensor=2", "workers": 3}, "layout: tensor=2 is not 3 ranks; train on 4"),
        ({"layout": "tensor=2,data=2", "workers": 6}, "data=2 x tensor=2 is not 6 ranks; train on 4"),
        ({"layout": "tensor=0"}, "tensor must be 1 or more, got 0"),
        ({"layout": "sensor=2"}, "did you mean tensor"),
        ({"layout": "tensor=2,data=2,tensor=3"}, "layout: option tensor is given twice; leave one out"),
        ({"layout": "tensor=2", "strategy": "gossip"}, "gossip needs 2 or more workers, got 1"),
        ({"layout": "tensor=2", "optimizer": "lars"}, "optimizer lars looks at whole layers"),
        ({"layout": "tensor=2", "driver": "compiled"}, "leave --layout out"),
        ({"layout": "tensor=10"}, r"tensor=10: 3 \(Linear\) has 9 outputs to split; use tensor=9 or less"),
    ],
)
def test_bad_layouts_are_refused_in_one_line(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        hocket.fit(task(), **{"engine": "threads", "progress": False} | settings)


@pytest.mark.parametrize("layout", ["tensor=2", "tensor=3"])
def test_a_run_sends_the_bytes_that_were_told_beforehand(layout: str) -> None:
    """And no more: what is sent when somebody looks at the model does not count."""
    inputs, _ = doubled()
    told = sum(layer.sent for layer in survey(perceptron(), Layout.parse(layout).over(None), inputs[:8]))
    assert told > 0
    assert fit(layout).bytes_sent == 60 * told
