"""A rate that is too high for so many workers is noticed before they start."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hocket
from hocket.run import rehearsal
from hocket.run.progress import Silent
from hocket.run.spec import RunSpec
from hocket.run.train import prepare


def warning(strategy: str, workers: int, **settings: Any) -> str:
    made = prepare(RunSpec("digits", strategy=strategy, workers=workers, engine="sim", **settings))
    return rehearsal.too_high(made.plan, made.task, made.train)


def test_a_rate_that_suits_the_workers_is_not_spoken_of() -> None:
    assert warning("hogwild", 2) == warning("leashed", 16) == ""


def test_tempering_would_do() -> None:
    found = warning("hogwild:stale=none", 16)
    assert "lr 0.1 looks too high for 16 workers" in found
    assert found.endswith("hogwild:stale=gap-mean would do")


def test_a_lower_rate_would_do_and_does() -> None:
    found = warning("mutex", 16, lr=1.0, momentum=0.0)
    assert "too high for 16 workers" in found and "--lr" in found
    lower = float(found.split("--lr ")[1].split()[0])
    assert lower < 1.0 and warning("mutex", 16, lr=lower, momentum=0.0) == ""


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [("allreduce", {}), ("server:mode=async", {}), ("hogwild:stale=none", dict(optimizer="adam"))],
)
def test_only_plain_steps_in_shared_memory_are_rehearsed(strategy: str, settings: dict[str, Any]) -> None:
    assert warning(strategy, 16, lr=5.0, **settings) == ""


def test_a_slow_model_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "PATIENCE_S", 0.0)
    assert warning("hogwild:stale=none", 16) == ""


class Notes(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


def test_it_is_said_before_the_run_and_changes_nothing_in_it() -> None:
    spec = RunSpec("digits", strategy="hogwild:stale=none", workers=16, engine="sim", epochs=1)
    notes = Notes()
    before = torch.get_rng_state()
    heard = prepare(spec).run(display=notes)
    assert "too high for 16 workers" in notes.lines[0]
    assert torch.equal(torch.get_rng_state(), before)
    silent = hocket.fit("digits", strategy="hogwild:stale=none", workers=16, engine="sim", epochs=1, progress=False)
    assert all(torch.equal(heard.state[name], silent.state[name]) for name in silent.state)
