"""Law: a gradient that leaves in buckets while it is computed is the one that leaves when it is complete."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from overlapping import OFF, ON

from hocket.engines.catalogue import Engine, Listener, Program, engine

ENGINES = [name for name in engine if not engine[name].drives_all]

os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


@cache
def facts(name: str, size: int) -> list[dict[str, Any]]:
    chosen: Engine = engine.make(name)
    return chosen.run(Program("overlapping:run_all"), size, Listener())


# All cases of one start of the ranks in a row: workers of xdist then rarely start the same
every_engine_and_size = pytest.mark.parametrize(
    ("name", "size"), [(name, size) for name in ENGINES for size in (1, 2, 3)], scope="module"
)


@pytest.mark.parametrize("case", ["tiny", "norm", "unused", "pieces", "own", "micro", "dropped"])
@every_engine_and_size
def test_buckets_come_to_the_same_bits(name: str, size: int, case: str) -> None:
    """Every engine sums each element by itself, in the order of the ranks."""
    for rank in facts(name, size):
        assert rank[f"{case}/{ON}"] == rank[f"{case}/{OFF}"]


@every_engine_and_size
def test_the_librarys_own_sums_may_differ_in_the_last_bit(name: str, size: int) -> None:
    for rank in facts(name, size):
        assert rank["native"] == pytest.approx(rank[f"tiny/{OFF}"], rel=1e-4, abs=1e-5)
        assert rank["native"] == facts(name, size)[0]["native"]
