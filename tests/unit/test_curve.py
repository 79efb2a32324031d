"""The learning curve: which model it judges, when, at which cost. 25 s."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import Odd, three_classes
from torch import Tensor, nn

import hocket
from hocket.drivers.gradients import WholeModel

TEXTS = [
    "allreduce", "local-sgd:every=5", "diloco:every=3", "gossip", "gossip:kind=sgp", "gossip:kind=adpsgd", "server",
    "server:mode=async", "server:mode=ssp", "elastic:every=3", "hogwild", "leashed",
]  # fmt: skip
SAMPLES = 240
JITTER = {"compute": "lognormal:1ms:0.4", "stragglers": "1x2"}


TASK = hocket.Task(model=Odd, data=(three_classes(), three_classes()), batch=8, epochs=4, lr=0.1)
DENSE = hocket.Task(
    model=lambda: nn.Sequential(nn.Linear(5, 3)), data=(three_classes(), three_classes()), batch=8, epochs=4, lr=0.1
)


def fit(text: str, task: hocket.Task = TASK, **settings: Any) -> hocket.Result:
    return hocket.fit(task, strategy=text, **dict(engine="sim", workers=4, progress=False) | settings)


def column(result: hocket.Result, name: str) -> list[Any]:
    return [point[name] for point in result.curve]


@pytest.mark.parametrize("text", TEXTS)
def test_looking_costs_nothing_and_changes_nothing(text: str) -> None:
    """However often somebody looks, the run takes as long and ends with the same model."""
    seldom, often = (fit(text, sim=JITTER, evaluate_every=every) for every in (100, 0.13))
    assert len(seldom.curve) == 1 and len(often.curve) > 25
    assert often.virtual_seconds == seldom.virtual_seconds
    assert all(torch.equal(often.state[name], seldom.state[name]) for name in seldom.state)
    for a, b in zip(often.per_worker, seldom.per_worker, strict=True):
        assert a["seconds"] == pytest.approx(b["seconds"]) and a["bytes_sent"] == b["bytes_sent"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("engine", ["sim", "threads"])
def test_points_come_at_the_same_numbers_of_samples(engine: str, text: str) -> None:
    found = fit(text, engine=engine, evaluate_every=0.25)
    assert column(found, "samples") == [64, 128, 192, 240, 304, 368, 432, 480, 544, 608, 672, 720, 784, 848, 912, 960]
    assert column(found, "seconds") == sorted(column(found, "seconds")) or engine != "sim"
    assert None not in column(found, "train_loss")


def test_compiled_workers_look_as_often() -> None:
    found = fit("hogwild", DENSE, engine="threads", evaluate_every=0.25)
    assert column(found, "samples") == column(fit("hogwild", evaluate_every=0.25), "samples")


LOCKSTEP = [
    "serial", "allreduce", "local-sgd:every=5", "local-sgd:every=4,group=2", "diloco:every=3", "gossip",
    "gossip:kind=sgp", "gossip:kind=pull,together=true", "server",
]  # fmt: skip


@pytest.mark.parametrize("text", LOCKSTEP)
def test_a_point_is_what_the_run_would_return_if_it_ended_there(text: str) -> None:
    """13 samples a worker and step: the last step of an epoch is uneven, and so are the weights of the replicas."""
    settings: dict[str, Any] = dict(batch=13, workers=1 if text == "serial" else 4)
    long = fit(text, epochs=3, **settings)
    for epochs in (1, 2):
        short = fit(text, epochs=epochs, **settings)
        assert long.curve[epochs - 1]["test_loss"] == pytest.approx(short.test_loss, rel=1e-5)


def test_the_centre_is_judged_not_the_workers() -> None:
    """Workers that never come to the centre leave it as it was, and the curve says so."""
    found = fit("elastic:every=1000000", epochs=8)
    untrained = fit("elastic:every=1000000", steps=1)
    assert column(found, "test_loss") == [untrained.test_loss] * 8
    assert found.curve[-1]["train_loss"] < 0.8 * found.curve[0]["train_loss"]


@pytest.mark.parametrize("text", ["server:mode=async", "gossip:kind=adpsgd", "hogwild", "elastic:every=3"])
def test_a_straggler_does_not_delay_the_points_of_the_others(text: str) -> None:
    """A worker 1,000 times slower takes one batch in all: the points come when the other three have come so far."""
    sim = {"compute": "1ms"}
    without = fit(text, workers=3, epochs=6, sim=sim)
    found = fit(text, workers=4, epochs=6, sim=sim | {"stragglers": "1x1000"})
    for ours, theirs in zip(column(found, "seconds")[:-1], column(without, "seconds"), strict=False):
        assert ours == pytest.approx(theirs, rel=0.1)
    assert found.curve[-1]["seconds"] == found.virtual_seconds > 1, "the run lasts until its last gradient is in"


def test_the_time_to_a_target_is_that_of_a_point() -> None:
    found = fit("server:mode=async", evaluate_every=0.1, epochs=20, target=0.8)
    assert found.verdict == "reached-target"
    reached = [point["seconds"] for point in found.curve if point["test_accuracy"] >= 0.8]
    assert found.time_to_target == reached[0]


@pytest.mark.parametrize("text", ["allreduce", "server:mode=async", "gossip"])
def test_many_workers_evaluate_little(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at the model is one look, not one a worker."""
    looks: list[int] = []
    evaluate = WholeModel.evaluate

    def counted(self: WholeModel, samples: Any, index: Tensor) -> Tensor:
        looks.extend([len(index)] * bool(len(index)))
        return evaluate(self, samples, index)

    monkeypatch.setattr(WholeModel, "evaluate", counted)
    found = fit(text, workers=48, batch=1, epochs=3)
    assert looks == [SAMPLES] * (1 + len(found.curve)), "once before the first step"


def test_each_replica_is_judged_on_request() -> None:
    assert not any("own_metric" in worker for worker in fit("gossip").per_worker)
    assert all("own_metric" in worker for worker in fit("gossip", own_metrics=True).per_worker)


@pytest.mark.parametrize("every", [0, -1, "nan", "often"])
def test_what_makes_no_sense_is_refused(every: Any) -> None:
    with pytest.raises(hocket.UserError, match="evaluate_every"):
        fit("allreduce", evaluate_every=every)
