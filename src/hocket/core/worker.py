"""The worker's side of a strategy: what the pseudocode of a paper calls `x`, `step`, `descend`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hocket.core.clock import Clock
from hocket.core.comm import Comm
from hocket.core.registry import Registry
from hocket.core.replica import Gradient, Replica, Weighted
from hocket.core.serving import Server
from hocket.core.sharing import SharedVector, Sharing

Steps = Generator[None, Gradient | None, None]
"""A strategy at work: yields for the gradient at `w.x`, is sent None after the last one."""

Need = Literal["messages", "collectives", "any-source", "polling", "shared-memory"]


class Strategy(ABC):
    """How replicas agree. A strategy is a frozen dataclass whose fields are its options."""

    name: ClassVar[str]
    fewest_workers: ClassVar[int] = 1
    most_workers: ClassVar[int] = 1_000_000_000

    @property
    def needs(self) -> frozenset[Need]:
        """What it asks of an engine."""
        return frozenset()

    @property
    def lockstep(self) -> bool:
        """Whether the workers take their steps together, so that all can meet at the end of an epoch."""
        return True

    def server_ranks(self) -> int:
        """How many ranks it needs beside the workers."""
        return 0

    def server(self, s: Server) -> None:
        """The life of a server rank, for a strategy that has any."""
        raise AssertionError(f"{self.name} has no servers")

    def sharing(self, dim: int, workers: int) -> Sharing | None:
        """How a vector of `dim` parameters lies in shared memory, for a strategy that needs it."""
        return None

    def check(self, workers: int) -> None:  # noqa: B027 - most strategies take any number of workers
        """Refuse options or a number of workers that cannot work, with one line that says what to do."""

    @abstractmethod
    def worker(self, w: Worker) -> Steps:
        """One worker's life, as the paper's pseudocode has it."""


strategy: Registry[Strategy] = Registry("strategy", "strategies")


class Worker:
    """One replica and its means to agree with others."""

    def __init__(
        self,
        comm: Comm,
        clock: Clock,
        model: Replica,
        optimizer: torch.optim.Optimizer,
        seed: int,
        optimizer_step: Callable[[], object],
        world: Comm | None = None,
    ) -> None:
        self.comm, self.clock = comm, clock
        self.world = world or comm
        """The workers, numbered as in `comm`, and the servers behind them."""
        self.rank, self.size = comm.rank, comm.size
        self.all_reduce: Callable[[Tensor], None] = comm.all_reduce
        """How gradients and replicas are summed; a strategy may put another algorithm in its place."""
        self.model = model
        self.x, self.replica = model.x, model.replica
        self.step = 0
        """Gradients taken so far."""
        self.layout = model.layout
        """Named, shaped views of a flat vector, for what needs shapes."""
        self.staleness: Counter[int] = Counter()
        """How many updates had which staleness."""
        self.rng = torch.Generator().manual_seed(seed * 1_000_003 + self.rank)
        self.common_rng = torch.Generator().manual_seed(seed)
        """Draws the same on every worker, for what all must agree on without asking."""
        self._shared: SharedVector | None = None
        self._optimizer = optimizer
        self._optimizer_step = optimizer_step

    @property
    def shared(self) -> SharedVector:
        """The vector that all workers share, for a strategy that needs shared memory."""
        assert self._shared is not None, "the strategy does not ask for shared memory"
        return self._shared

    @shared.setter
    def shared(self, shared: SharedVector) -> None:
        self._shared = shared

    @property
    def lr(self) -> float:
        """The learning rate of this step."""
        return max(float(group["lr"]) for group in self._optimizer.param_groups)

    def descend(self, g: Gradient, stale: int = 0) -> None:
        """One step of the optimizer along `g`. No samples, no step: momentum and decay rest too.

        `stale` is how many updates came between the read that `g` was computed at and this one.
        """
        if g.samples == 0:
            return
        if g.flat is not self.model.gradient:
            self.model.g.copy_(g.vector)
        self.staleness[stale] += 1
        self._optimizer_step()

    def average(self, g: Gradient) -> None:
        """Replace `g` by the mean over all samples of all workers: sum |B_i| g_i / sum |B_i|."""
        g.samples = self._weighted_mean(g.flat, g.samples)

    def average_replicas(self, samples: float, comm: Comm | None = None) -> None:
        """Replace every replica by their mean, each weighted by the samples it has seen since the last one.

        `comm` is a part of the workers that averages by itself; without it, all do.
        """
        # A replica without samples weighs next to nothing; where none has any, they are averaged as equals.
        self._weighted_mean(self.model.block, samples or 1e-9, comm)
        self._average_odd_buffers(comm)

    def average_buffers(self) -> None:
        """Give all replicas the same BatchNorm statistics."""
        if self.model.buffers.values.numel():
            self._weighted_mean(self.model.buffers, 1.0)
        self._average_odd_buffers()

    def _average_odd_buffers(self, comm: Comm | None = None) -> None:
        for buffer in self.model.odd_buffers:
            (comm or self.comm).all_reduce(buffer, "mean")

    def optimizer_state(self) -> Sequence[Tensor]:
        """The optimizer's vectors, such as momentum: what is as long as a parameter."""
        return [
            value
            for state in self._optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.dim() > 0
        ]

    def _weighted_mean(self, vector: Weighted, weight: float, comm: Comm | None = None) -> float:
        """Replace `vector` by its mean over the ranks; returns the sum of the weights."""
        if (comm or self.comm).size == 1:
            return weight
        vector.values.mul_(weight)
        vector.weight.fill_(weight)
        (comm.all_reduce if comm else self.all_reduce)(vector.buffer)
        total = vector.weight.item()
        assert total > 0, "a weighted mean needs a sample"
        vector.values.div_(total)
        return total
