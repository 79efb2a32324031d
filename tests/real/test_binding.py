"""Ranks are tied to cores of their own where that was asked for, and never two to one."""

from __future__ import annotations

import os

import pytest
from test_failures import PROCESSES, run

from hocket.core.errors import UserError
from hocket.engines import binding
from hocket.engines.catalogue import engine

CORES = sorted(os.sched_getaffinity(0))


@pytest.mark.skipif(len(CORES) < 2, reason="one core is nothing to choose from")
@pytest.mark.parametrize("name", PROCESSES)
def test_each_rank_has_a_core_of_its_own(name: str) -> None:
    first, second = run(f"{name}:bind=core", "says_where_it_may_run", size=2)
    assert len(first) == len(second) == 1
    assert first != second


@pytest.mark.parametrize("name", PROCESSES)
def test_more_ranks_than_cores_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"--bind core: .* use --bind none"):
        engine.make(f"{name}:bind=core").check(len(CORES) + 1)


@pytest.mark.parametrize(("busy", "bound"), [(0.1, True), (0.9, False)])
def test_auto_binds_to_idle_cores_alone(busy: float, bound: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 4, 7})
    monkeypatch.setattr(binding, "_busy_shares", lambda seconds: {3: 0.8, 4: busy, 7: 0.0})
    assert binding.chosen_cores("auto", 2) == ([4, 7] if bound else [])
    assert binding.chosen_cores("core", 2) == ([4, 7] if bound else [3, 7])
    assert binding.chosen_cores("none", 2) == binding.chosen_cores("auto", 4) == []
