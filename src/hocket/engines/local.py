"""Ranks in one process: mailboxes and rendezvous, shared by the engines `threads` and `sim`.

The two differ only in their `World`: how a rank waits, and what time a message takes.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from hocket.core.clock import Clock
from hocket.core.comm import (
    ANY,
    Comm,
    Deferred,
    Op,
    Rank,
    Request,
    Turns,
    receiving,
    reduce_in_order,
    sender,
)
from hocket.core.errors import Aborted, CommError, NothingCame
from hocket.core.message import Message
from hocket.core.replica import own_memory
from hocket.core.sharing import SharedVector, Sharing
from hocket.core.status import Status

current: ContextVar[Rank | None] = ContextVar("rank", default=None)
"""The Rank of the thread or greenlet that asks, where it is one."""


Call = tuple[Any, ...]
"""What a rank calls: the name of a collective, how much of what it brings, and what becomes of it."""


@dataclass(slots=True)  # made at every collective: a frozen one takes four times as long
class Wait:
    """What a blocked rank is waiting for, in words and as a test."""

    operation: str
    peers: Callable[[], str]
    ready: Callable[[], float | None]
    """The time at which the wait is over, or None while nobody knows."""


@dataclass(eq=False, slots=True)
class Envelope:
    """A message on its way; `order` is when it was sent, among all."""

    order: int
    source: int
    tag: int
    msg: Message
    nbytes: int
    arrival_s: float = 0.0
    free: bool = False
    """Sent for nothing, so it is seen to for nothing."""


class World(ABC):
    """The ranks of one run and what lies between them."""

    offers: ClassVar[frozenset[str]]
    engine: ClassVar[str]

    def __init__(self, size: int) -> None:
        self.size = size
        self.statuses = [Status(stop=self.check) for _ in range(size)]
        self.mail: dict[tuple[int, int], list[Envelope]] = {}
        self.meetings: dict[tuple[int, int], Meeting] = {}
        self.aborted = False
        self.sent = 0
        self.contexts = 0
        self._together: dict[tuple[str, int, torch.dtype, torch.device], Tensor] = {}

    def together(self, purpose: str, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory that is the same for all ranks who ask for the same."""
        new = own_memory(purpose, length, dtype, device)
        return self._together.setdefault((purpose, length, dtype, device), new)

    def check(self) -> None:
        if self.aborted:
            raise Aborted("the run is being stopped")

    @abstractmethod
    def exclusive(self) -> AbstractContextManager[Any]:
        """Inside, no other rank touches the world."""

    @abstractmethod
    def wait(self, rank: int, what: Wait, timeout: float | None) -> bool:
        """Block until `what` is ready (True) or `timeout` has passed (False). Called inside `exclusive`."""

    @abstractmethod
    def changed(self, ranks: Sequence[int]) -> None:
        """Something that these ranks may be waiting for has happened."""

    @abstractmethod
    def clock(self, rank: int) -> Clock: ...

    def turns(self, rank: int) -> Turns | None:
        """For a rank that takes turns with the others."""
        return None

    def catch_up(self, rank: int) -> None:  # noqa: B027 - real time needs no care
        """Let everything happen that comes before this rank's present."""

    def post(self, source: int, to: int, envelope: Envelope) -> float:
        """Set when a message sent now arrives; returns when the sender is free again."""
        return 0.0

    def received(self, rank: int, envelope: Envelope) -> None:  # noqa: B027 - real time passes by itself
        """A rank takes up a message that has come in."""

    def meeting_ends(self, last: int, context: int, arrived_s: float, kind: str, nbytes: int, size: int) -> float:
        """When a collective of the communicator `context` is over, to which `last`, the last rank, comes now."""
        return time.perf_counter()

    def abort(self) -> None:
        """Wake every rank with `Aborted`."""
        with self.exclusive():
            self.aborted = True
            self.changed(range(self.size))

    def prepare_shared(self) -> None:  # noqa: B027 - a simulated memory needs nothing
        """Compile what shared memory needs: by every rank before they meet, where there is a deadline."""

    @abstractmethod
    def make_shared(self, sharing: Sharing, x: Tensor) -> Any:
        """Memory that all ranks share, with the parameters `x` in it."""

    @abstractmethod
    def shared_by(self, memory: Any, rank: int, worker: int) -> SharedVector:
        """What a rank, which has the number `worker` there, sees of such memory."""

    def carriers(self, body: Callable[[int], None]) -> list[Callable[[], None]]:
        """What threads must be started for, so that `body` is called for every rank."""
        return [partial(body, rank) for rank in range(self.size)]

    def thread_began(self, rank: int) -> None:  # noqa: B027 - a world may need nothing here
        """Called first by each rank."""

    def thread_ended(self, rank: int) -> None:  # noqa: B027 - nor here
        """Called last by each rank."""


@dataclass(slots=True)
class Meeting:
    """One collective: what each member brought, and when all may leave."""

    call: Call
    brought: dict[int, Any] = field(default_factory=dict)
    apart: str = ""
    """Who did something else than the others."""
    arrived_s: float = 0.0
    result: list[Any] | None = None
    leave_s: float = 0.0
    left: int = 0


def told(call: Call) -> str:
    """A collective in words."""
    kind, *what = call
    if not what:
        return str(kind)
    length, dtype, *op = what
    return f"{kind} of {length} {str(dtype).removeprefix('torch.')}" + (f" ({op[0]})" if op and op[0] != "sum" else "")


class LocalComm:
    """A communicator of some of a world's ranks. `members[rank]` is the world's number for `rank`."""

    def __init__(self, world: World, context: int, members: Sequence[int], rank: int) -> None:
        self._world, self._context = world, context
        self._members = list(members)
        self.rank, self.size = rank, len(members)
        self._me = self._members[rank]
        self._clock = world.clock(self._me)
        self._met = 0

    def send(self, to: int, msg: Message, tag: int = 0) -> None:
        free_s = self._post(to, msg, tag)
        with self._world.exclusive():
            sent = Wait(f"send(to={to})", lambda: "its own network card", lambda: free_s)
            self._world.wait(self._me, sent, None)

    def isend(self, to: int, msg: Message, tag: int = 0) -> Request:
        self._post(to, msg, tag)
        return Deferred(lambda: None)

    def _post(self, to: int, msg: Message, tag: int) -> float:
        world, target = self._world, self._members[to]
        with world.exclusive():
            world.check()
            world.catch_up(self._me)
            world.sent += 1
            envelope = Envelope(world.sent, self.rank, tag, msg.copy(), msg.nbytes)
            free_s = world.post(self._me, target, envelope)
            world.mail.setdefault((self._context, target), []).append(envelope)
            world.changed([target])
        return free_s

    def recv(self, source: int = ANY, tag: int = 0, timeout: float | None = None) -> tuple[int, Message]:
        world = self._world
        with world.exclusive():
            world.catch_up(self._me)
            box = world.mail.setdefault((self._context, self._me), [])

            found: Envelope | None = None

            def ready() -> float | None:  # a plain loop: a server may have a thousand messages to look through
                nonlocal found
                found = None
                for e in box:
                    fits = e.tag == tag and source in (ANY, e.source)
                    if fits and (found is None or (e.arrival_s, e.order) < (found.arrival_s, found.order)):
                        found = e
                return None if found is None else found.arrival_s

            who = sender(source if source == ANY else self._members[source])
            operation = receiving(source, tag)
            if not world.wait(self._me, Wait(operation, lambda: who, ready), timeout):
                raise NothingCame(self._me, timeout, operation)
            assert found is not None, "nobody else can have come between"
            box.remove(found)
            world.received(self._me, found)
            return found.source, found.msg

    def _meet(self, call: Call, mine: Any, nbytes: int, combine: Callable[[list[Any]], list[Any]]) -> Callable[[], Any]:
        """Bring `mine` to the next collective; the returned call waits and gives this rank's result."""
        return self._brought(call, mine, nbytes, combine)[0]

    def _brought(
        self, call: Call, mine: Any, nbytes: int, combine: Callable[[list[Any]], list[Any]]
    ) -> tuple[Callable[[], Any], Meeting]:
        kind = call[0]
        world, key = self._world, (self._context, self._met)
        self._met += 1
        with world.exclusive():
            world.check()
            meeting = world.meetings.get(key)
            if meeting is None:
                meeting = world.meetings[key] = Meeting(call)
            elif meeting.call != call and not meeting.apart:
                first = self._members[next(iter(meeting.brought))]
                meeting.apart = f"rank {first} in {told(meeting.call)}, rank {self._me} in {told(call)}"
            meeting.brought[self.rank] = mine
            meeting.arrived_s = max(meeting.arrived_s, self._clock.now())
            if len(meeting.brought) == self.size:
                brought = [meeting.brought[r] for r in range(self.size)]
                meeting.result = brought if meeting.apart else combine(brought)
                meeting.leave_s = world.meeting_ends(
                    self._me, self._context, meeting.arrived_s, kind, nbytes, self.size
                )
                world.changed(self._members)

        def absent() -> str:
            missing = [self._members[r] for r in range(self.size) if r not in meeting.brought]
            return "rank" + "s" * (len(missing) > 1) + " " + ", ".join(map(str, missing))

        def finish() -> Any:
            with world.exclusive():
                what = Wait(kind, absent, lambda: None if meeting.result is None else meeting.leave_s)
                world.wait(self._me, what, None)
                assert meeting.result is not None
                meeting.left += 1
                if meeting.left == self.size:
                    del world.meetings[key]
                if meeting.apart:
                    raise CommError(f"{meeting.apart}; all ranks must call the same collectives in the same order")
                return meeting.result[self.rank]

        return finish, meeting

    def all_reduce(self, x: Tensor, op: Op = "sum") -> None:
        x = x.detach() if x.requires_grad else x
        x.copy_(self._sum(x, op)[0]())

    def iall_reduce(self, x: Tensor, op: Op = "sum") -> Request:
        # What was brought is read when the last rank arrives; until then the caller may not change it,
        # and this rank's result is only written when it waits.
        x = x.detach()
        finish, meeting = self._sum(x, op)
        return Deferred(lambda: _assign(x, finish()), lambda: meeting.leave_s)

    def _sum(self, x: Tensor, op: Op) -> tuple[Callable[[], Tensor], Meeting]:
        def combine(parts: list[Tensor]) -> list[Tensor]:
            return [reduce_in_order(parts, op)] * self.size

        return self._brought(("all_reduce", x.numel(), x.dtype, op), x, _nbytes(x), combine)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op = "sum") -> None:
        def combine(parts: list[Tensor]) -> list[Tensor]:
            return list(reduce_in_order(parts, op).chunk(self.size))

        _assign(out, self._meet(("reduce_scatter", x.numel(), x.dtype, op), x.detach().clone(), _nbytes(x), combine)())

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        def combine(parts: list[Tensor]) -> list[Tensor]:
            return [torch.cat([p.reshape(-1) for p in parts])] * self.size

        finish = self._meet(("all_gather", x.numel(), x.dtype), x.detach().clone(), _nbytes(out), combine)
        _assign(out, finish().view(out.shape))

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        def combine(parts: list[Tensor]) -> list[Tensor]:
            return [parts[root]] * self.size

        mine = x.detach().clone() if self.rank == root else None
        _assign(x, self._meet(("broadcast", x.numel(), x.dtype), mine, _nbytes(x), combine)())

    def barrier(self) -> None:
        self._meet(("barrier",), None, 0, lambda parts: parts)()

    @property
    def native(self) -> LocalComm:
        return self

    def background(self) -> LocalComm:
        return self  # whoever comes last adds up for all

    def split(self, color: int, key: int = 0) -> Comm:
        def combine(parts: list[tuple[int, int, int]]) -> list[tuple[int, list[int]]]:
            groups = {}
            for c in sorted({c for c, _, _ in parts}):
                self._world.contexts += 1
                ranks = sorted((k, r) for pc, k, r in parts if pc == c)
                groups[c] = (self._world.contexts, [r for _, r in ranks])
            return [groups[c] for c, _, _ in parts]

        context, ranks = self._meet(("split",), (color, key, self.rank), 0, combine)()
        members = [self._members[r] for r in ranks]
        return LocalComm(self._world, context, members, ranks.index(self.rank))

    def counter(self, numbers: int = 1) -> LocalCounter:
        made = self._meet(("counter",), None, 0, lambda parts: [[0] * numbers] * self.size)()
        return LocalCounter(self._world, self._me, made)

    def share(self, sharing: Sharing, x: Tensor) -> SharedVector:
        def combine(parts: list[Tensor]) -> list[Any]:
            return [self._world.make_shared(sharing, parts[0])] * self.size

        self._world.prepare_shared()
        shared_by = self._meet(("share",), x.detach(), 0, combine)()
        return self._world.shared_by(shared_by, self._me, self.rank)


@dataclass(frozen=True)
class LocalCounter:
    """A counter that all ranks of a world see."""

    world: World
    rank: int
    numbers: list[int]

    def take(self, count: int = 1, number: int = 0) -> int:
        with self.world.exclusive():
            if count == 1:  # else it is a sign to the others, which must not wait for what is earlier
                self.world.catch_up(self.rank)
            before = self.numbers[number]
            self.numbers[number] += count
            return before

    def close(self) -> None:
        pass


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _assign(x: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        x.copy_(value)
