"""Memory that is asked for and not used takes none."""

from __future__ import annotations

import gc
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

import hocket
from hocket.core.memory_use import untouched_zeros
from hocket.tasks.base import SampleSet

CPU = torch.device("cpu")


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("length", [0, 1, 1000, 300_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_they_are_zeros_that_can_be_written(length: int, dtype: torch.dtype) -> None:
    found = untouched_zeros(length, dtype, CPU)
    assert found.dtype == dtype and torch.equal(found, torch.zeros(length, dtype=dtype))
    found += 1
    assert torch.equal(found, torch.ones(length, dtype=dtype))


def test_they_take_memory_when_they_are_written() -> None:
    length = 2**26  # 256 MiB
    before = resident()
    zeros = untouched_zeros(length, torch.float32, CPU)
    assert resident() - before < length
    zeros.fill_(1)
    assert resident() - before > 3 * length


@pytest.mark.parametrize(
    "settings",
    [
        {"engine": "sim", "strategy": "allreduce"},
        {"engine": "sim", "strategy": "allreduce", "validation": 0.1},
        {"engine": "threads", "strategy": "hogwild"},
        {"engine": "fleet", "strategy": "local-sgd"},
    ],
    ids=lambda settings: "-".join(str(value) for value in settings.values()),
)
def test_a_run_that_is_over_holds_no_samples(settings: dict[str, Any]) -> None:
    """A study makes hundreds of runs in one process."""

    def held() -> int:
        gc.collect()
        return sum(type(thing) is SampleSet for thing in gc.get_objects())

    before = held()
    hocket.fit("digits", steps=2, workers=2, **settings)
    assert held() <= before
