"""Where the time of workers went: of all in a setting together, and of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hocket.measure.result import TIMES
from hocket.report.charts import BARS, command_of
from hocket.report.figures import Axis, Figure, Series
from hocket.report.records import Group

_WORDS = {"waiting": "waiting for others", "locks": "waiting for locks"}
Worker = Mapping[str, Any]
"""What a run tells of one."""


def time_split(groups: Sequence[Group], clock: str) -> Figure | None:
    rows = {group.name: [worker for one in _workers(group) for worker in one] for group in groups}
    return _figure(f"split-{clock.split()[0]}", "Where the workers' time went", rows, groups)


def worker_split(groups: Sequence[Group], clock: str) -> Figure | None:
    """Of each worker, over all seeds; nothing where each works alone."""
    rows = {
        f"{group.name}, worker {number}": list(same)
        for group in groups
        if (runs := _workers(group)) and len(runs[0]) > 1
        for number, same in enumerate(zip(*runs, strict=False))
    }
    return _figure(f"workers-{clock.split()[0]}", "Where each worker's time went", rows, groups)


def _workers(group: Group) -> list[list[Worker]]:
    """By run."""
    found = [[worker for worker in record["per_worker"] if TIMES[0] in worker] for record in group.good]
    return [workers for workers in found if workers]


def _figure(name: str, title: str, rows: Mapping[str, Sequence[Worker]], groups: Sequence[Group]) -> Figure | None:
    known = [(name, workers) for name, workers in rows.items() if workers]
    shown = known[:BARS]
    if not shown:
        return None
    series = [Series(_WORDS.get(part, part), [name for name, _ in shown], []) for part in TIMES]
    for _, workers in shown:
        total = sum(worker["seconds"] for worker in workers) or 1.0
        for part, one in zip(TIMES, series, strict=True):
            one.y.append(sum(worker[part] for worker in workers) / total)
    says = f"The first {BARS} of {len(known)}." if len(known) > BARS else ""
    share = Axis("share of the time", zero=True, percent=True)
    return Figure(name, title, "stacks", Axis(""), share, series, says, command_of(groups))
