"""A run without a common pace stops at its target too. 25 s."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tiny import Odd, on_threads, three_classes
from torch import nn

import hocket
from hocket.core.brake import Brake
from hocket.core.comm import Rank
from hocket.drivers.feed import Pool
from hocket.strategies import strategy

TEXTS = [
    "server:mode=async", "server:mode=ssp", "server:mode=dssp", "server:mode=async,servers=2", "elastic",
    "elastic:every=3", "gossip:kind=adpsgd", "hogwild", "hogwild:every=3", "leashed", "mutex", "rwlock",
]  # fmt: skip
EPOCHS, TARGET = 60, 0.9


ODD = hocket.Task(model=Odd, data=(three_classes(), three_classes()), batch=8, epochs=EPOCHS, lr=0.05)
DENSE = hocket.Task(
    model=lambda: nn.Sequential(nn.Linear(5, 3)),
    data=(three_classes(), three_classes()),
    batch=8,
    epochs=EPOCHS,
    lr=0.05,
)


def stops(task: hocket.Task, text: str, engine: str, **settings: Any) -> None:
    found = hocket.fit(task, strategy=text, engine=engine, workers=3, target=TARGET, seed=2, progress=False, **settings)
    assert found.verdict == "reached-target"
    assert 1 <= found.epochs < EPOCHS / 2
    assert found.test_metric is not None and found.test_metric >= TARGET - 0.05
    assert found.time_to_target is not None
    assert sum(worker["samples"] for worker in found.per_worker) < EPOCHS / 2 * 240


def test_these_are_all_that_have_none() -> None:
    assert {name for name in strategy if not strategy.make(name).lockstep} <= {t.partition(":")[0] for t in TEXTS}
    assert not any(strategy.make(text).lockstep for text in TEXTS)


@pytest.mark.parametrize("engine", ["threads", "sim"])
@pytest.mark.parametrize("text", TEXTS)
def test_at_the_target(engine: str, text: str) -> None:
    stops(ODD, text, engine)


# (this file is a task to the ranks, which cannot import what the tests share)
@pytest.mark.parametrize("text", ["server:mode=async", pytest.param("hogwild", marks=pytest.mark.thorough)])
def test_in_processes(text: str) -> None:
    stops(ODD, text, "mpi")


@pytest.mark.parametrize("text", ["hogwild", "leashed", "mutex", "rwlock"])
def test_compiled(text: str) -> None:
    stops(DENSE, text, "threads")


@pytest.mark.parametrize("engine", ["threads", "sim"])
@pytest.mark.parametrize("text", ["server:mode=async", "gossip:kind=adpsgd", "hogwild"])
def test_a_run_that_has_stopped_goes_on_to_another_goal(tmp_path: Path, engine: str, text: str) -> None:
    settings: dict[str, Any] = dict(strategy=text, engine=engine, workers=3, seed=2, progress=False)
    found = hocket.fit(ODD, target=0.7, checkpoint_every=1, out=tmp_path / "run", **settings)
    assert found.verdict == "reached-target"
    more = math.ceil(found.epochs) + 3
    found = hocket.resume(tmp_path / "run", task=ODD, progress=False, target=None, epochs=more)
    assert (found.verdict, found.epochs) == ("finished", more)
    assert sum(worker["samples"] for worker in found.per_worker) == more * 240, "each sample once an epoch"


def test_several_may_find_the_target_at_once() -> None:
    def main(rank: Rank) -> tuple[bool, bool]:
        pool = Pool(rank.comm, 1000, math.inf, at_the_end=False)
        for _ in range(rank.comm.rank):
            pool.draw(Brake())
            pool.spend()
        rank.comm.barrier()
        pool.empty()
        rank.comm.barrier()
        ticket, meets, _ = pool.draw(Brake())
        pool.close()
        return ticket >= 1000, meets

    assert on_threads(main, 8) == [(True, False)] * 8
