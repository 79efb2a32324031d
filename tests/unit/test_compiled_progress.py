"""How far compiled workers are is seen while they work, and counted when they have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hocket.drivers.compiled import CompiledWorkers
from hocket.kernels.memory.words import NEXT

STEPS, WORKERS, BATCH = 100, 2, 4


def under_way(handed_out: int) -> Any:
    workers = CompiledWorkers.__new__(CompiledWorkers)
    plan, shards = SimpleNamespace(workers=WORKERS, batch=BATCH), SimpleNamespace(steps=STEPS)
    schedule = SimpleNamespace(at=lambda step: 1.0 - step / 1000)
    workers._course = SimpleNamespace(plan=plan, shards=shards, schedule=schedule)
    control = np.zeros(NEXT + 1, np.int64)
    control[NEXT] = handed_out
    workers._shared = SimpleNamespace(control=control)
    return workers


@pytest.mark.parametrize(("handed_out", "steps"), [(20, 0), (21, 0), (26, 3), (80, 30), (83, 30)])
def test_a_worker_has_its_share_of_what_was_handed_out(handed_out: int, steps: int) -> None:
    """Who finds nothing left has counted on, beyond the stretch's last batch."""
    seen = under_way(handed_out)._uncounted(epoch=1, first=20, last=80)
    assert seen == (steps, steps * BATCH, 1.0 - (STEPS + 1 + min(handed_out, 80) // WORKERS) / 1000)
