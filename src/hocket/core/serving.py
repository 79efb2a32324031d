"""The server's side of a strategy: a part of the parameter vector, how to step it, and what workers ask for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from hocket.core.clock import Clock
from hocket.core.comm import Comm
from hocket.core.hyperparameters import Hyperparameters
from hocket.core.message import Message, Seal, as_it_is
from hocket.core.staleness import ByGap, LookedAhead, by_gap, looked_ahead
from hocket.core.state import Kept, State

T = TypeVar("T")
Log = Callable[..., None]
"""Writes an event with its fields to the event log."""


@dataclass(frozen=True)
class Frame:
    """What a server does that its strategy need not know of."""

    show: Callable[[int], None]
    """Send a worker the parameters as they are."""
    save: Callable[[], None]
    load: Callable[[Tensor], None]


class Server:
    """One server rank. `x` is the part of the parameters that it holds."""

    def __init__(
        self,
        comm: Comm,
        clock: Clock,
        workers: int,
        x: Tensor,
        gradient: Tensor,
        optimizer: torch.optim.Optimizer,
        optimizer_step: Callable[[], object],
        log: Log,
        frame: Frame,
        kept: Kept | None = None,
        seal: Seal = as_it_is,
        by_gap: ByGap = by_gap,
        looked_ahead: LookedAhead = looked_ahead,
    ) -> None:
        self.comm, self.clock, self.workers, self.x = comm, clock, workers, x
        self.by_gap, self.looked_ahead = by_gap, looked_ahead
        """How vectors are tempered by their gap, and how far they will go, in the way that is fastest here; what is
        tempered holds until the next."""
        self.seal = seal
        """A vector as the worker that it is sent to will find it; see `Worker.seal`."""
        self.active = set(range(workers))
        """Workers that may send something any moment: not those that are done, or away for a while."""
        self.staleness: Counter[int] = Counter()
        """How many updates had which staleness."""
        self.log = log
        self._kept = kept or Kept()
        self._progress = self.keep("progress", State(version=0))
        self.keep("staleness", self.staleness)
        self._gradient, self._optimizer, self._optimizer_step = gradient, optimizer, optimizer_step
        self._hyperparameters = Hyperparameters(optimizer)
        self._frame = frame

    @property
    def version(self) -> int:
        """Updates applied so far."""
        version: int = self._progress.version
        return version

    @version.setter
    def version(self, version: int) -> None:
        self._progress.version = version

    def keep(self, name: str, value: T) -> T:
        """Give a name to what outlives a request; see `Worker.keep`."""
        return self._kept.keep(name, value)

    def tune(self, hyperparameters: Tensor) -> None:
        """Take over the rate, momentum and so on that a worker had when it found its gradient."""
        self._hyperparameters.take_over(hyperparameters)

    @property
    def reach(self) -> float:
        """How far a gradient of 1 moves a parameter in the end: the rate, and what momentum makes of it."""
        return max(float(group["lr"] / (1 - group.get("momentum", 0.0))) for group in self._optimizer.param_groups)

    def descend(self, g: Tensor) -> None:
        """One step of the optimizer along `g`."""
        if g is not self._gradient:
            self._gradient.copy_(g)
        self._optimizer_step()
        self.version += 1

    def requests(self) -> Iterator[tuple[int, Message]]:
        """What workers ask for, until all are done.

        A worker that is `away` or `done` shows up here too: who waited for it may go on. While all are away the run
        may be saved, or another state loaded. Workers come back together: with the first word of it all count as
        active, since what one sends next may overtake another's word. Who wants a `look` at the parameters gets them
        at once.
        """
        done: set[int] = set()
        returning: set[int] = set()
        asked_to_save = False
        while len(done) < self.workers:
            worker, msg = self.comm.recv()
            match msg.kind:
                case "look":
                    self._frame.show(worker)
                    continue
                case "load":
                    self._frame.load(msg.tensors[0])
                    self._frame.show(worker)  # so it knows, and nobody goes on before
                    continue
                case "save":
                    asked_to_save = True
                case "back":
                    if worker not in returning:
                        self.active |= set(range(self.workers)) - done
                        returning |= self.active
                    returning.discard(worker)
                    continue
                case "away" | "done":
                    self.active.discard(worker)
                    if msg.kind == "done":
                        done.add(worker)
                    yield worker, msg
                    if msg.kind == "away":
                        self._frame.show(worker)  # so it knows that all it has sent before has been seen to
                case _:
                    yield worker, msg
            if asked_to_save and not self.active:
                asked_to_save = False
                self._frame.save()


def parts(vector: Tensor, servers: int) -> Sequence[Tensor]:
    """How a vector is shared out between servers."""
    return vector.tensor_split(servers) if servers > 1 else (vector,)
