"""What every engine is: something that starts ranks and carries their messages, and knows nothing of SGD."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from hocket.core.comm import Rank
from hocket.core.deadline import DEADLINE_S as DEADLINE_S
from hocket.core.deadline import check_deadline as check_deadline
from hocket.core.errors import RankFailed
from hocket.core.registry import Registry
from hocket.core.status import Status
from hocket.core.worker import Need

Main = Callable[[Rank], Any]
"""What each rank runs; its result is a JSON value."""


@dataclass(frozen=True)
class Light:
    """A main whose ranks may share one thread: they talk to each other outside of autograd alone."""

    main: Main

    def __call__(self, rank: Rank) -> Any:
        return self.main(rank)


Batched = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class Program:
    """A main that a fresh process can find again: a module-level function and a JSON value for it."""

    function: str
    """As `package.module:function`."""
    argument: dict[str, Any] = field(default_factory=dict)

    def __call__(self, rank: Rank) -> Any:
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(module), name)(rank, self.argument)


class Listener:
    """Hears what the ranks tell while they run. This one ignores it all."""

    def hear(self, rank: int, kind: str, data: dict[str, Any], blob: bytes) -> None:
        """A rank told something (may be called from several threads, one call at a time)."""

    def output(self, line: str) -> None:
        """A rank's process printed a line."""

    def failed(self, failure: RankFailed) -> None:
        """A rank failed in a run that another launcher is about to end."""

    def tick(self, statuses: Sequence[Status]) -> None:
        """Called a few times a second with what each rank is doing."""


TICK_S = 0.1
"""How often a listener's `tick` is called."""
STOP_S = 10.0
"""How long the ranks may take to save and to tell what there is, after they were asked to stop."""


class Engine(ABC):
    """Starts ranks. Engines are frozen dataclasses; `run` returns one result a rank, or raises RankFailed."""

    name: ClassVar[str]
    offers: ClassVar[frozenset[Need]]
    virtual_time: ClassVar[bool] = False
    """Whether its clock is a model of time."""
    runs_compiled: ClassVar[bool] = False
    """Whether its ranks are threads that can run compiled workers beside each other."""
    drives_all: ClassVar[bool] = False
    """Whether one rank stands for all workers, whose replicas it has as rows of a matrix."""
    spans_hosts: ClassVar[bool] = False
    """Whether it starts ranks on other machines (`hosts`)."""
    preference: ClassVar[int] = 0
    """Unless the user names one, the engine that can start and has the highest; 0 is never."""

    @classmethod
    def unavailable(cls) -> str:
        """Why it cannot start here; empty if it can."""
        return ""

    @classmethod
    def launched_by(cls) -> str:
        """The launcher that has started this process as one of this engine's ranks; empty if none has."""
        return ""

    @classmethod
    def room(cls, hosts: str) -> int:
        """Ranks that a launcher has started, or that `hosts` have room for; 0 is any number."""
        return 0

    def check(self, size: int) -> None:  # noqa: B027 - most engines take any number of ranks
        """Refuse what would keep so many ranks from starting, before anything is started or written."""

    def note(self) -> str:
        """What the user should know of it before ranks start; mostly nothing."""
        return ""

    def batches(self) -> Batched:
        """Whether the gradients of many ranks shall be computed in one call: of ranks that take turns."""
        return "off"

    def starts_processes(self) -> bool:
        """Whether `run` starts fresh processes, which can only run a `Program`."""
        return False

    @abstractmethod
    def run(self, main: Main, size: int, listener: Listener) -> list[Any]: ...


engine: Registry[Engine] = Registry("engine", "engines")


def operation_of(error: BaseException, status: Status) -> str:
    """What a rank was doing when it failed; an error that knows better says so."""
    return str(getattr(error, "operation", status.operation))


def first_failure(failures: Sequence[RankFailed]) -> RankFailed:
    """The failure that explains the others: the first, but for those that only tell of another rank's end."""

    def echo(failure: RankFailed) -> int:
        kinds = ("DeadlineExceeded:", "CommError:", "Aborted:")
        return next((i for i, kind in enumerate(kinds, 1) if failure.reason.startswith(kind)), 0)

    return min(failures, key=echo)


def explained(failure: RankFailed, statuses: Sequence[Status]) -> RankFailed:
    """A rank that waited in vain cannot know what the others did meanwhile; who started them does."""
    if not failure.reason.startswith("DeadlineExceeded:"):
        return failure
    others = [f"rank {r} was in {s.operation} at step {s.step}" for r, s in enumerate(statuses) if r != failure.rank]
    reason = f"{failure.reason}; {', '.join(others[:8])}"
    return RankFailed(failure.rank, failure.operation, reason, failure.traceback)
