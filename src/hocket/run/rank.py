"""One rank's part in a run, in a process of its own."""

from __future__ import annotations

from typing import Any

from hocket.core.comm import Rank
from hocket.drivers.own_loop import run_rank, serve_rank
from hocket.drivers.plan import Plan
from hocket.run.loading import load_task


def run_program(rank: Rank, argument: dict[str, Any]) -> dict[str, Any]:
    """The plan says it all."""
    plan = Plan.from_json(argument)
    task = load_task(plan.task, plan.seed, plan.data, plan.test_data)
    if rank.comm.rank >= plan.training_ranks:
        return serve_rank(rank, plan, task)
    return run_rank(rank, plan, task, *task.load())
