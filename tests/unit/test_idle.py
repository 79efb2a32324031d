"""Options that change nothing, and runs that learn nothing: both are said."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import tiny
import torch
from tiny import simulated
from torch import nn

import hocket
from hocket.app.summary import summary
from hocket.core.errors import UserError
from hocket.core.registry import options
from hocket.lab import axes
from hocket.lab.runs import Runs
from hocket.run.idle import idle_note
from hocket.strategies import strategy
from hocket.tasks.base import SampleSet, most_frequent

OTHER: dict[str, Any] = {
    "slack": 0, "low": 0, "high": 2, "lookahead": 0.5, "graph": "complete", "between": 1, "backoff": "yield",
    "backoff_us": 500.0, "backoff_max_us": 600.0, "bucket": 1, "hot": 0.5, "mix": 0.25,
}  # fmt: skip
"""A value that matters where the option does."""

VARIANTS = [
    *(name for name in strategy if strategy[name].most_workers > 1),
    *(f"server:mode={mode}" for mode in ("async", "ssp", "dssp")),
    *(f"gossip:kind={kind}" for kind in ("adpsgd", "sgp", "pull", "push")),
    *(f"mutex:backoff={kind}" for kind in ("constant", "exponential", "yield")),
    "local-sgd:group=2",
]


@pytest.mark.parametrize("text", VARIANTS)
def test_what_is_called_idle_changes_nothing(text: str) -> None:
    """A slow worker, and memory that is slow enough to be waited for."""
    sim = dict(compute="lognormal:1ms:0.3", stragglers="1x3", memory="100KB")

    def trained(chosen: str) -> hocket.Result:
        return simulated(tiny.task(48, batch=2), sim, workers=4, strategy=chosen)

    made = strategy.make(text)
    assert made.idle().keys() <= {option.name for option in options(type(made))}
    changed = dataclasses.replace(made, **{name: OTHER[name] for name in made.idle()})
    as_text = (
        text.partition(":")[0] + ":" + ",".join(f"{o.name}={getattr(changed, o.name)}" for o in options(type(made)))
    )
    one, two = trained(text), trained(as_text)
    assert one.virtual_seconds == two.virtual_seconds
    assert all(torch.equal(tensor, two.state[name]) for name, tensor in one.state.items())


def test_what_is_written_for_nothing_is_said() -> None:
    assert idle_note("server:mode=async,slack=3,servers=2") == "server: slack has no effect with mode=async"
    assert idle_note("gossip:kind=sgp,graph=ring") == "gossip: graph has no effect with kind=sgp"
    assert idle_note("hogwild:backoff=yield") == "hogwild: backoff has no effect"
    assert idle_note("server:mode=ssp,slack=3") == idle_note("server:mode=async") == idle_note("server") == ""


def test_a_run_says_it() -> None:
    notes: list[str] = []

    class Noted(hocket.run.progress.Silent):  # type: ignore[name-defined,misc]
        def note(self, line: str) -> None:
            notes.append(line)

    spec = hocket.RunSpec("", strategy="server:slack=3", engine="sim")
    hocket.run.train.prepare(spec, tiny.task(8)).run(display=Noted())
    assert notes == ["server: slack has no effect with mode=sync"]


def test_what_is_idle_is_tuned_beside_what_makes_it_so() -> None:
    def names(wishes: list[str], text: str) -> list[str]:
        return [wish.name for wish in axes.fitting(axes.read(wishes, [text, "server:mode=ssp"]), text)]

    assert names(["slack", "lr"], "server:mode=async") == ["lr"]
    assert names(["slack", "mode"], "server:mode=async") == ["slack", "mode"]


class TestLearntNothing:
    def test_the_most_frequent_class(self) -> None:
        x = torch.zeros(10, 2)
        assert most_frequent(SampleSet((x, torch.tensor([0, 1, 1, 2, 1, 0, 1, 1, 1, 0])), "test")) == 0.6
        assert most_frequent(SampleSet((x, torch.zeros(10, 3)), "test")) is None

    def result(self, task: hocket.Task, **settings: Any) -> hocket.Result:
        return simulated(task, {}, workers=1, strategy="serial", **settings)

    def test_no_better_than_always_giving_one_answer(self) -> None:
        x, y = tiny.three_classes()
        task = hocket.Task(lambda: nn.Linear(5, 3), ((x, y), (x, y)), epochs=5, batch=8, lr=0.1)
        assert self.result(task).learnt
        assert not self.result(dataclasses.replace(task, model=lambda: Constant()), epochs=1).learnt

    def test_the_verdict_says_so(self, capsys: pytest.CaptureFixture[str]) -> None:
        x, y = tiny.three_classes()
        task = hocket.Task(lambda: nn.Linear(5, 3), ((x, y), (x, y)), epochs=5, batch=8, lr=0.1)
        told = []
        for model in (task.model, Constant):
            summary(self.result(dataclasses.replace(task, model=model)))
            told.append(re.sub(r" +", " ", capsys.readouterr().out).splitlines()[0].strip())
        assert told == ["verdict finished", "verdict finished, but it has learnt nothing"]

    def test_another_metric_goes_by_the_loss(self) -> None:
        x, _ = tiny.three_classes()
        task = hocket.Task(
            lambda: nn.Linear(5, 5), ((x, x), (x, x)), nn.functional.mse_loss, nn.functional.mse_loss, "mse", True,
            epochs=3, batch=8, lr=0.1,
        )  # fmt: skip
        assert self.result(task).learnt
        away = self.result(dataclasses.replace(task, lr=5.0), steps=4)
        assert away.verdict == "finished" and not away.learnt

    def test_it_has_no_speed_in_a_table(self) -> None:
        x, y = tiny.three_classes()
        task = hocket.Task(lambda: Constant(), ((x, y), (x, y)), epochs=1, batch=8)
        runs = Runs()
        runs.add(self.result(task))
        assert runs.in_vain == 1 and not runs.speeds


class Constant(nn.Module):
    """Says the first class whatever it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.zeros(len(x), 3)
        first[:, 0] = 1.0
        return first + 0 * self.scale


class TestTargets:
    def test_a_share_is_at_most_1(self) -> None:
        with pytest.raises(UserError, match="target must be from 0 to 1, as accuracy is a share; got 97"):
            hocket.Task(lambda: nn.Linear(1, 2), lambda: None, target=97)  # type: ignore[arg-type,return-value]
        with pytest.raises(UserError, match="as accuracy is a share; got -"):
            hocket.fit(tiny.task(8), target=-0.5, engine="sim")

    def test_what_is_called_accuracy_may_be_in_percent(self) -> None:
        made = hocket.Task(lambda: nn.Linear(1, 2), lambda: None, metric=lambda a, b: 0.0, target=97)  # type: ignore[arg-type,return-value]
        assert made.target == 97 and not made.metric_is_share


def test_servers_have_times_too() -> None:
    result = simulated(tiny.task(24), {"serve": "1ms"}, workers=3, strategy="server:mode=async,servers=2")
    assert len(result.per_worker) == 3 and len(result.per_server) == 2
    for server in result.per_server:
        parts = ("computing", "sending", "transferring", "waiting", "locks")
        assert sum(server[part] for part in parts) == pytest.approx(server["seconds"])
        assert server["bytes_sent"] > 0 and server["waiting"] > 0
    assert "per_server" in result.to_json()
    assert simulated(tiny.task(24), {}, workers=2, strategy="allreduce").per_server == []
