"""All that a strategy may say to other ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from hocket.core.brake import Brake
from hocket.core.clock import Clock
from hocket.core.message import Message
from hocket.core.replica import Memory, own_memory
from hocket.core.sharing import SharedVector, Sharing
from hocket.core.status import Status

ANY = -1
"""As a source: whoever sends first."""

Op = Literal["sum", "mean", "max", "min"]


def receiving(source: int, tag: int) -> str:
    """A receive, as errors call it and the status of a rank."""
    return f"recv(source={'ANY' if source == ANY else source}, tag={tag})"


def sender(source: int) -> str:
    """Whom a receive waits for."""
    return "any rank" if source == ANY else f"rank {source}"


class Request(Protocol):
    """An operation under way."""

    def wait(self) -> None: ...

    @property
    def ended_s(self) -> float:
        """After `wait`: when it was over, on the clock that ranks of a host share. Infinite where only who waits for
        it knows that it is."""


@dataclass(slots=True)  # made at every message: a frozen one takes four times as long
class Deferred:
    """A request that is finished by calling something."""

    finish: Callable[[], None]
    ended: Callable[[], float] = lambda: math.inf

    def wait(self) -> None:
        self.finish()

    @property
    def ended_s(self) -> float:
        return self.ended()


class Counter(Protocol):
    """Numbers that the ranks count up together, each at its own pace: nobody has to answer.

    Making and closing one is a collective; the rest is not.
    """

    def take(self, count: int = 1, number: int = 0) -> int:
        """What the number was; then it is `count` more. Who takes one at a time gets what no other rank gets."""

    def close(self) -> None: ...


class Comm(Protocol):
    """Messages and collectives among `size` ranks. Every wait ends at the engine's deadline at the latest.

    A rank sends to others, not to itself. Collectives are called by all ranks of the communicator in the same order.
    `all_gather` and `reduce_scatter` follow torch.distributed's `*_tensor` forms: the larger
    of the two tensors is `size` times as long as the smaller.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def send(self, to: int, msg: Message, tag: int = 0) -> None: ...
    def recv(self, source: int = ANY, tag: int = 0, timeout: float | None = None) -> tuple[int, Message]: ...
    def isend(self, to: int, msg: Message, tag: int = 0) -> Request: ...

    def all_reduce(self, x: Tensor, op: Op = "sum") -> None: ...
    def iall_reduce(self, x: Tensor, op: Op = "sum") -> Request: ...
    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op = "sum") -> None: ...
    def all_gather(self, out: Tensor, x: Tensor) -> None: ...
    def broadcast(self, x: Tensor, root: int = 0) -> None: ...
    def barrier(self) -> None: ...

    def split(self, color: int, key: int = 0) -> Comm: ...

    @property
    def native(self) -> Comm:
        """The same ranks by the engine's library alone, where the engine has something better for ranks of one host."""

    def background(self) -> Comm:
        """The same ranks, for `iall_reduce` alone: here it goes on by itself while the rank computes. Made by all ranks
        together."""

    def counter(self, numbers: int = 1) -> Counter: ...

    def share(self, sharing: Sharing, x: Tensor) -> SharedVector:
        """Put rank 0's `x` where all ranks see it. For engines that offer shared memory."""


Tell = Callable[[str, dict[str, Any], bytes], None]
"""Sends one record (kind, JSON values, bytes) to where the run was started."""


T = TypeVar("T")


class Turns(Protocol):
    """For ranks of one process that take turns in virtual time: one may do the work of all."""

    def common(self, make: Callable[[], T]) -> T:
        """What all ranks have in common: made by the first that asks."""

    def let_earlier_run(self) -> None:
        """Until every rank that is earlier in virtual time waits for something."""


@dataclass
class Rank:
    """One rank's place in a run: what an engine hands to the program it starts."""

    comm: Comm
    clock: Clock
    tell: Tell
    status: Status
    offers: frozenset[str]
    """What its engine can do for a strategy; see `Strategy.needs`."""
    brake: Brake = field(default_factory=Brake)
    """Where the rank hears that the run shall be saved, or end."""
    engine: str = ""
    """What its engine is called, for the record."""
    turns: Turns | None = None
    """None where ranks run at the same time, or in other processes."""
    together: Memory = own_memory
    """Gives all ranks of a process that ask for the same the same memory."""
    draws: bool = False
    """Whether a timeline is drawn of what a script does."""


def reduce_in_order(parts: list[Tensor], op: Op) -> Tensor:
    """Combine one tensor a rank, in rank order, so that the result is the same every time."""
    total = parts[0].clone()
    here = [part.to(total.device) for part in parts[1:]]  # ranks on threads may each have a GPU of their own
    match op:
        case "sum" | "mean":
            for part in here:
                total.add_(part)
        case "max":
            for part in here:
                torch.maximum(total, part, out=total)
        case "min":
            for part in here:
                torch.minimum(total, part, out=total)
    if op == "mean":
        total /= len(parts)
    return total


@lru_cache(maxsize=4096)  # asked at every collective, by each of a thousand simulated ranks
def ring_bytes(numel: int, itemsize: int, size: int, rank: int) -> int:
    """Bytes that `rank` sends in a ring all-reduce: every chunk but one, in each of the two phases.

    Summed over the ranks this is 2 (p - 1) n, the least that any all-reduce can send.
    """
    if size == 1:
        return 0
    even, rest = divmod(numel, size)  # the first `rest` chunks are one longer
    kept = 2 * even + ((rank + 1) % size < rest) + ((rank + 2) % size < rest)
    return (2 * numel - kept) * itemsize
