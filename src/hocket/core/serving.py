"""The server's side of a strategy: a part of the parameter vector and how to step it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from torch import Tensor

from hocket.core.clock import Clock
from hocket.core.comm import Comm

Log = Callable[..., None]
"""Writes an event with its fields to the event log."""


class Server:
    """One server rank. `x` is the part of the parameters that it holds."""

    def __init__(
        self,
        comm: Comm,
        clock: Clock,
        workers: int,
        x: Tensor,
        gradient: Tensor,
        optimizer_step: Callable[[], object],
        log: Log,
    ) -> None:
        self.comm, self.clock, self.workers, self.x = comm, clock, workers, x
        self.version = 0
        """Updates applied so far."""
        self.staleness: Counter[int] = Counter()
        """How many updates had which staleness."""
        self.log = log
        self._gradient, self._optimizer_step = gradient, optimizer_step

    def descend(self, g: Tensor) -> None:
        """One step of the optimizer along `g`."""
        self._gradient.copy_(g)
        self._optimizer_step()
        self.version += 1


def parts(vector: Tensor, servers: int) -> Sequence[Tensor]:
    """How a vector is shared out between servers."""
    return vector.tensor_split(servers)
