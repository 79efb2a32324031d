"""In which order the stages of a pipeline take the micro-batches of a step.

With m micro-batches on p stages of equal cost, `gpipe` (Huang et al. 2019) and `1f1b` (Narayanan et al. 2019,
PipeDream) leave a stage idle for (p - 1) / (m + p - 1) of a step. `gpipe` has all m in flight, `1f1b` no more than p.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from hocket.layouts.mesh import Schedule


class Action(NamedTuple):
    """One micro-batch on its way through a stage."""

    way: Literal["there", "back"]
    batch: int


def actions(schedule: Schedule, stage: int, stages: int, batches: int) -> list[Action]:
    """What a stage does in one step. `naive` is for one batch: a stage waits while another works."""
    there = [Action("there", i) for i in range(batches)]
    back = [Action("back", i) for i in range(batches)]
    ahead = min(stages - 1 - stage, batches) if schedule == "1f1b" else batches
    steady = [action for pair in zip(there[ahead:], back, strict=False) for action in pair]
    return there[:ahead] + steady + back[batches - ahead :]


def pieces(schedule: Schedule, stages: int, asked: int, samples: int, least: int = 1) -> int:
    """Micro-batches that so many samples are cut into; each has at least so many, where there are as many."""
    if schedule == "naive":
        return 1
    return max(min(asked or 4 * stages, samples // least), 1)


def bubble(stages: int, batches: int) -> float:
    """The share of a step in which a stage is idle, at best."""
    return (stages - 1) / (batches + stages - 1)
