"""What a rank must know to train: everything decided, nothing optional."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hocket.strategies import Strategy, strategy


@dataclass(frozen=True)
class Goal:
    """The metric at which a run stops early; infinite is never."""

    value: float = math.inf
    lower_is_better: bool = False

    @classmethod
    def never(cls) -> Goal:
        return cls()

    def reached(self, metric: float) -> bool:
        if not math.isfinite(metric):
            return False
        return metric <= self.value if self.lower_is_better else metric >= self.value


@dataclass(frozen=True)
class Cadence:
    """How often a checkpoint is written: every so many epochs, or seconds; infinite is never."""

    epochs: float = math.inf
    seconds: float = math.inf


@dataclass(frozen=True)
class Plan:
    """One training, decided. `strategy` and `task` are texts, so that a fresh process can make them again."""

    task: str
    """Empty for an object of the user's that has no name."""
    data: str
    """Where data sets are; empty is where they are usually looked for."""
    test_data: str
    strategy: str
    workers: int
    steps: int
    """Steps of the whole run, if all workers take equally many."""
    batch: int
    """Samples a step of each worker."""
    lr: float
    lr_decay: float
    """What the learning rate is multiplied by after every epoch."""
    scale_lr: bool
    warmup: float
    """Epochs over which the learning rate rises to its full height."""
    momentum: float
    optimizer: str
    seed: int
    goal: Goal
    evaluate_every: float
    """Epochs between two points of the learning curve."""
    own_metrics: bool
    """Whether each replica is judged by itself in the end."""
    device: str
    trace: int
    """Events that each rank logs one by one."""
    checkpoint: Cadence
    resume: str
    """The checkpoint to go on from; empty is a new start."""
    compiled: bool = False
    """Whether the workers run compiled, outside Python."""
    batched: bool = False
    """Whether the gradients of many workers are computed in one call."""

    @cached_property
    def made_strategy(self) -> Strategy:
        return strategy.make(self.strategy)

    @property
    def driver(self) -> str:
        """Who takes the steps."""
        return "compiled" if self.compiled else "pytorch"

    @property
    def servers(self) -> int:
        """Ranks behind the workers."""
        return self.made_strategy.server_ranks()

    def to_json(self) -> dict[str, Any]:
        """JSON has no infinity; null stands for it."""
        values = dataclasses.asdict(self)
        for part in ("goal", "checkpoint"):
            values[part] = {k: None if v == math.inf else v for k, v in values[part].items()}
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Plan:
        kinds: dict[str, Any] = {"goal": Goal, "checkpoint": Cadence}
        nested = {
            part: kind(**{k: math.inf if v is None else v for k, v in values[part].items()})
            for part, kind in kinds.items()
        }
        return cls(**values | nested)
