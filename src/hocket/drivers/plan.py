"""What a rank must know to train: everything decided, nothing optional."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hocket.compress import Compressor, Identity, make
from hocket.core.errors import UserError
from hocket.layouts.mesh import Layout
from hocket.strategies import Strategy, strategy

_ROUNDING = 1e-6
"""What a metric may fall short of its goal by, as a share of it: in 32 bits 342 right of 360 are less than 0.95."""


@dataclass(frozen=True)
class Goal:
    """The metric at which a run stops early; infinite is never."""

    value: float = math.inf
    lower_is_better: bool = False

    @classmethod
    def never(cls) -> Goal:
        return cls()

    def reached(self, metric: float) -> bool:
        if not (math.isfinite(metric) and math.isfinite(self.value)):
            return False
        short = metric - self.value if self.lower_is_better else self.value - metric
        return short <= _ROUNDING * abs(self.value)


@dataclass(frozen=True)
class Cadence:
    """How often a checkpoint is written: every so many epochs, or seconds; infinite is never."""

    epochs: float = math.inf
    seconds: float = math.inf


def compressor_for(text: str, chosen: Strategy) -> Compressor:
    """The compressor that a text describes, if there is anything for it to do under a strategy."""
    made = make(text)
    if not isinstance(made, Identity) and not chosen.sends:
        raise UserError(f"strategy {chosen.name} sends nothing that could be compressed; leave compress out")
    if not isinstance(made, Identity) and chosen.sends_early:
        raise UserError(
            f"what {chosen.name} sends while gradients are computed cannot be compressed; leave one of the two out: "
            "--compress, or overlap=on (allreduce), delay (diloco)"
        )
    return made


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
    lr_falls: bool
    """Whether the rate falls linearly, to 0 at the end of the run."""
    scale_lr: bool
    warmup: float
    """Epochs over which the learning rate rises to its full height."""
    momentum: float
    optimizer: str
    schedule: str
    """One of torch.optim.lr_scheduler, by name and options, or empty."""
    clip: float
    """The longest that a gradient may be; 0 is any length."""
    accumulate: int
    """Pieces that a batch is computed in."""
    autocast: str
    """What the model computes in: `bf16`, or `none` for what its parameters are."""
    loaders: int
    """Processes beside each worker that take samples for it."""
    seed: int
    validation: float
    """Share of the training samples that is kept back and judged in place of the test samples; 0 is none, or what the
    task brings."""
    goal: Goal
    evaluate_every: float
    """Epochs between two points of the learning curve."""
    own_metrics: bool
    """Whether each replica is judged by itself in the end."""
    train_metrics: bool
    """Whether the model is judged on the training samples in the end."""
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
    compress: str = "none"
    timeline: bool = False
    layout: str = ""
    """How a worker's model is split over ranks, such as tensor=2; empty is not at all."""

    @cached_property
    def made_compressor(self) -> Compressor:
        return make(self.compress)

    @cached_property
    def made_strategy(self) -> Strategy:
        return strategy.make(self.strategy)

    @cached_property
    def made_layout(self) -> Layout:
        return dataclasses.replace(Layout.parse(self.layout), data=self.workers)

    @property
    def training_ranks(self) -> int:
        """Workers, each as many ranks as its model is split over."""
        return self.workers * self.made_layout.ranks

    @property
    def piece(self) -> int:
        """Samples that are computed at a time."""
        return self.batch // self.accumulate

    @property
    def autocasts(self) -> bool:
        return self.autocast != "none"

    @property
    def is_plain(self) -> bool:
        """Whether a step is one of sgd on a whole batch, at a rate that changes between epochs at most."""
        beside = self.warmup or self.clip or self.loaders or self.schedule or self.autocasts
        return self.optimizer == "sgd" and self.accumulate == 1 and not beside

    @property
    def driver(self) -> str:
        """Who takes the steps."""
        return "compiled" if self.compiled else "pytorch"

    @property
    def servers(self) -> int:
        """Ranks behind the workers: each server is as many as a worker's model is split over."""
        return self.made_strategy.server_ranks() * self.made_layout.ranks

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
