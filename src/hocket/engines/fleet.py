"""The engine `fleet`: all workers at once, in virtual time.

Where workers only meet in collectives and none looks at its rank, they all do the same to vectors of their own. So one
rank stands for all: what is a vector of a worker is a row of a matrix, a collective reduces over the rows, and time is
a vector too. Times and results are those of `sim`.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import numpy as np
from torch import Tensor

from hocket.core.clock import RealClock
from hocket.core.comm import Op, Rank, ring_bytes
from hocket.core.deadline import DEADLINE_S
from hocket.core.errors import UserError
from hocket.core.registry import filled_in
from hocket.core.units import bytes_per_second, seconds
from hocket.core.worker import Need
from hocket.engines.crew import run_threads
from hocket.engines.engine import Engine, Listener, Main, engine
from hocket.engines.sim_costs import collective_s, compute_model, compute_of_all, slow_groups, slowdowns
from hocket.engines.threads import ThreadWorld


@engine("fleet")
@dataclass(frozen=True)
class Fleet(Engine):
    """All workers at once as rows of a matrix, in virtual time: for strategies that need only collectives."""

    compute: str = "lognormal:1ms:0.15"
    """Time of a full batch's gradient: `2ms`, `lognormal:2ms:0.3` (median, sigma) or `times:FILE`."""
    latency: str = "50us"
    bandwidth: str = "10Gbit"
    stragglers: str = ""
    """How many workers are how much slower: `2x3` is two workers, each 3 times slower; `2x3+1x1.5` adds one more."""
    seed: int = 0
    workers: int = filled_in(0)
    offers: ClassVar[frozenset[Need]] = frozenset({"collectives"})
    virtual_time: ClassVar[bool] = True
    drives_all: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if compute_model(self.compute, random.Random())(0) is None:
            raise UserError("fleet: compute=measured needs gradients one by one; use --engine sim")
        slow_groups(self.stragglers, 1 << 30)
        seconds(self.latency, "latency")
        bytes_per_second(self.bandwidth, "bandwidth")

    def check(self, size: int) -> None:
        slow_groups(self.stragglers, size)

    def run(self, main: Main, size: int, listener: Listener) -> list[Any]:
        """`main` gives one result a worker."""
        world = FleetWorld(1, DEADLINE_S)
        world.statuses *= size

        def all_of_them(rank: Rank) -> Any:
            time = FleetTime(self, size)
            comm: Any = FleetComm(time, size)  # it has no messages
            return main(Rank(comm, FleetClock(time), rank.tell, rank.status, world.offers, rank.brake, self.name))

        found: list[Any] = run_threads(world, all_of_them, listener)[0]
        return found


class FleetWorld(ThreadWorld):
    """The one thread that does it all."""

    offers: ClassVar[frozenset[str]] = Fleet.offers
    engine: ClassVar[str] = Fleet.name


class FleetTime:
    """Every worker's virtual time, and where it went."""

    def __init__(self, fleet: Fleet, size: int) -> None:
        self.size = size
        self._latency_s = seconds(fleet.latency, "latency")
        self._byte_s = 1 / bytes_per_second(fleet.bandwidth, "bandwidth")
        self._draw = compute_of_all(fleet.compute, fleet.seed, size)
        self._slow = np.array(slowdowns(fleet.stragglers, size, size))
        self.now_s = np.zeros(size)
        self.waiting_s, self.transferring_s = np.zeros(size), np.zeros(size)
        self._traffic: Counter[tuple[int, int, int]] = Counter()
        """All-reduces by the elements of a vector, the bytes of each, and the ranks of a group."""

    def charge(self, shares: np.ndarray[Any, Any] | float) -> None:
        """Every worker has computed a gradient on a share of a full batch."""
        self.now_s += self._draw() * shares * self._slow

    def meet(self, size: int, cost_s: float) -> None:
        """The workers of each group of this size wait for the last of them, and for what they do together."""
        groups = self.now_s.reshape(-1, size)
        last = groups.max(1, keepdims=True)
        self.waiting_s += (last - groups).reshape(-1)
        self.transferring_s += cost_s
        groups[:] = last + cost_s

    def all_reduce(self, numel: int, itemsize: int, size: int) -> None:
        self._traffic[numel, itemsize, size] += 1
        self.meet(size, collective_s("all_reduce", numel * itemsize, size, self._latency_s, self._byte_s))

    def bytes_sent(self, rank: int) -> int:
        """As a meter counts them."""
        return sum(
            count * ring_bytes(numel, itemsize, size, rank % size)
            for (numel, itemsize, size), count in self._traffic.items()
        )


class FleetClock(RealClock):
    """Virtual time, as one asks who cares for the workers' latest."""

    def __init__(self, time: FleetTime) -> None:
        super().__init__()
        self.time = time

    def now(self) -> float:
        return float(self.time.now_s.max())


@dataclass(frozen=True)
class Groups:
    """Ranks in groups of this size, one behind the other."""

    size: int


class EveryRank:
    """The rank of all workers at once. All that may be asked of it is which groups they form."""

    def __floordiv__(self, size: int) -> Groups:
        return Groups(size)

    def _refuse(self, *_: object) -> NoReturn:
        raise UserError("the strategy's workers look at their rank, so fleet cannot run them at once; use --engine sim")

    __bool__ = __int__ = __index__ = __float__ = __mod__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __str__ = __repr__ = __xor__ = __and__ = __or__ = _refuse
    __eq__ = __ne__ = _refuse


class FleetComm:
    """Collectives over the rows of a matrix: all of them, or in groups. A row is what a rank would bring."""

    def __init__(self, time: FleetTime, size: int) -> None:
        self.time, self.size, self.rank = time, size, EveryRank()

    def all_reduce(self, x: Tensor, op: Op = "sum") -> None:
        self.reduce([x], op)

    def reduce(self, parts: list[Tensor], op: Op = "sum") -> None:
        """One all-reduce of vectors that lie behind each other."""
        for x in parts:
            groups = x.view(-1, self.size, *x.shape[1:])
            match op:
                case "sum":
                    total = groups.sum(1, keepdim=True)
                case "mean":
                    total = groups.mean(1, keepdim=True)
                case "max":
                    total = groups.amax(1, keepdim=True)
                case "min":
                    total = groups.amin(1, keepdim=True)
            groups.copy_(total.expand_as(groups))
        self.time.all_reduce(sum(x[0].numel() for x in parts), parts[0].element_size(), self.size)

    def split(self, color: Groups, key: int = 0) -> FleetComm:
        return FleetComm(self.time, color.size)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise UserError(f"fleet has no {name}, which the strategy asks for; use --engine sim")
