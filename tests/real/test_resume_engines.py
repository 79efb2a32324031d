"""Law: k steps, save, load in fresh processes, the rest = uninterrupted, on every engine.

In workers that keep in step it holds bit for bit. Those that do not have, in the end, trained on every sample as often
as there were epochs. (On `sim`, tests/conformance/test_saved_runs.py has the law bit for bit for all.)
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import saving
from covering import THOROUGH

from hocket.engines.catalogue import Engine, Listener, Program, engine
from hocket.strategies import Strategy, strategy

os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])

VARIANTS = [
    "allreduce:algorithm=ring", "allreduce:algorithm=halving", "allreduce:algorithm=tree",
    "local-sgd:every=3,momentum=average", "local-sgd:every=3,momentum=reset", "local-sgd:every=2,post_local=4",
    "local-sgd:every=2,between=2,group=1", "diloco:every=4", "diloco:every=5,fragments=3,delay=2",
    "gossip:kind=sgp", "gossip:kind=pull", "gossip:kind=push", "gossip:kind=push,together=true", "gossip:kind=adpsgd",
    "gossip:graph=exponential",
    "server:mode=sync,servers=2", "server:mode=async", "server:mode=ssp,slack=1", "server:mode=dssp",
    "server:mode=async,push_every=2,fetch_every=3", "server:mode=async,servers=2,stale=tail",
    "elastic:every=2,stale=gap", "hogwild:every=3", "leashed:persistence=1,stale=tail",
]  # fmt: skip
ADAM = ["allreduce|adam", "local-sgd:every=3|adam", "server:mode=sync|adam", "server:mode=async|adam"]
CASES = [*strategy, *VARIANTS, *ADAM]
ENGINES = [name for name in engine if not engine[name].virtual_time]
EVERY = [pytest.param(name, ranks, marks=() if ranks == 3 else THOROUGH) for name in ENGINES for ranks in (2, 3, 5)]
STEPS, CUT = 27, 13
"""Neither is the end of an epoch, for any number of workers."""


def made(case: str) -> Strategy:
    return strategy.make(case.partition("|")[0])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each rank found in the runs without a stop, and in those that were taken up: two starts of the ranks."""

    @cache
    def found(name: str, ranks: int) -> tuple[list[Any], list[Any]]:
        chosen: Engine = engine.make(name)
        argument = {
            "task": "random" if chosen.starts_processes() else "small",
            "cases": [case for case in CASES if made(case).needs <= chosen.offers],
            "keep": str(tmp_path_factory.mktemp("kept")),
            "steps": STEPS,
            "cut": CUT,
        }
        whole, resumed = (
            chosen.run(Program(f"saving:{each}", argument), ranks, Listener()) for each in ("save_all", "resume_all")
        )
        return whole, resumed

    return found


@pytest.mark.parametrize(("name", "ranks"), EVERY)
def test_workers_in_step_go_on_as_if_nothing_had_happened(runs: Any, name: str, ranks: int) -> None:
    whole, resumed = runs(name, ranks)
    lockstep = [case for case in whole[0] if made(case).lockstep]
    assert len(lockstep) >= 8
    for mine, other in zip(whole, resumed, strict=True):
        for case in lockstep:
            assert mine[case] == other[case], case


@pytest.mark.parametrize(("name", "ranks"), EVERY)
def test_others_have_trained_on_every_sample_in_the_end(runs: Any, name: str, ranks: int) -> None:
    whole, resumed = runs(name, ranks)
    others = [case for case in whole[0] if not made(case).lockstep]
    assert len(others) >= 4
    for case in others:
        assert count(whole, case) == count(resumed, case), case


def count(everyone: list[Any], case: str) -> int:
    samples = sum(rank[case].get("samples", 0) for rank in everyone)
    assert samples > saving.SAMPLES
    return samples
