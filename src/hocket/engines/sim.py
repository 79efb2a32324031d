"""The engine `sim`: virtual time, real arithmetic.

Each rank is a thread or a greenlet (batons.py), but only the one that holds the baton runs. A rank passes the baton on
when it waits, and before it sends or receives if others are behind it in virtual time. The next to run is
always the one with the earliest virtual time, so events happen in time order and every run repeats bit for bit.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from threading import RLock
from typing import Any, ClassVar

from torch import Tensor

from hocket.core.clock import FORWARD
from hocket.core.errors import CommError, UserError
from hocket.core.memory_use import seldom_collecting
from hocket.core.registry import filled_in
from hocket.core.sharing import SharedVector, Sharing
from hocket.core.units import bytes_per_second, seconds
from hocket.core.worker import Need
from hocket.engines.batons import Batons, Body, WithinOneThread, best_batons
from hocket.engines.crew import run_threads
from hocket.engines.engine import Batched, Engine, Light, Listener, Main, engine
from hocket.engines.local import Envelope, Wait, World
from hocket.engines.sim_clock import SimClock, SimTurns
from hocket.engines.sim_costs import SERVER_PASSES, Cores, collective_s, compute_model, slow_groups, slowdowns
from hocket.engines.sim_domains import domains_of
from hocket.engines.sim_memory import SimulatedMemory, SimulatedVector


@engine("sim")
@dataclass(frozen=True)
class Sim(Engine):
    """A deterministic simulator: real gradients, virtual time, any number of workers."""

    compute: str = "lognormal:1ms:0.15"
    """Time of a full batch's gradient: `2ms`, `lognormal:2ms:0.3` (median, sigma), `times:FILE` or `measured`."""
    serve: str = "50us"
    """What a server takes for a message, beside ten passes over its bytes in memory."""
    cores: int = 0
    """Cores that all ranks share; 0 gives each rank its own."""
    latency: str = "50us"
    bandwidth: str = "10Gbit"
    memory: str = "80Gbit"
    """What one worker reads or writes of shared memory in a second."""
    block: int = 1024
    """Parameters of shared memory that a worker reads or writes before others may come in between."""
    domains: int = 0
    """Memory domains in which those blocks lie, and the workers sit, in turn; 0 is memory that nobody waits for."""
    controller: str = "320Gbit"
    """What each domain's memory moves in a second for all workers together."""
    far: float = 2.0
    """How many times as long a worker takes for a block of another domain."""
    window: float = 1.5
    """From where a worker of HOGWILD! looks at a parameter to where others see what it wrote there, in the time that a
    cache line takes, for each other worker that writes near it."""
    stragglers: str = ""
    """How many workers are how much slower: `2x3` is two workers, each 3 times slower; `2x3+1x1.5` adds one more."""
    batched: Batched = "auto"
    """Whether the gradients of many workers are computed in one call; `auto` is where the model allows it."""
    ties: int = 0
    """Seed for the order of simultaneous events; 0 is rank order."""
    seed: int = 0
    workers: int = filled_in(0)
    """Ranks that compute, and may be slow; those behind them serve. 0 is all."""
    offers: ClassVar[frozenset[Need]] = frozenset({"messages", "collectives", "any-source", "polling", "shared-memory"})
    virtual_time: ClassVar[bool] = True

    def __post_init__(self) -> None:
        compute_model(self.compute, random.Random())
        slow_groups(self.stragglers, 1 << 30)
        seconds(self.latency, "latency")
        bytes_per_second(self.bandwidth, "bandwidth")
        domains_of(self.domains, self.memory, self.controller, self.far)
        seconds(self.serve, "serve")
        if not 0 <= self.window < 2**40:
            raise UserError(f"sim: window must be 0 or more cache lines, and less than 2**40; got {self.window:g}")
        if not 0 <= self.cores < 2**40:
            raise UserError(f"sim: cores must be 0 or more, and less than 2**40; got {self.cores}")
        if not 1 <= self.block < 2**40:
            raise UserError(f"sim: block must be 1 or more parameters, and less than 2**40; got {self.block}")
        if self.batched == "on" and self.compute == "measured":
            raise UserError("sim: batched=on leaves no gradient's own time to be measured; use batched=off")
        if self.workers < 0:
            raise UserError(f"sim: workers must be 0 or more, got {self.workers}")

    def check(self, size: int) -> None:
        slow_groups(self.stragglers, size)

    def batches(self) -> Batched:
        return "off" if self.compute == "measured" else self.batched

    def run(self, main: Main, size: int, listener: Listener) -> list[Any]:
        may_share_a_thread = isinstance(main, Light) and self.compute != "measured"
        world = SimWorld(self, size, best_batons(size, may_share_a_thread=may_share_a_thread))
        world.begin()
        with seldom_collecting():
            return run_threads(world, main, listener)


class SimWorld(World):
    """Virtual time: a heap of (time, rank) to resume, a baton a rank, and a queue at each network card."""

    offers: ClassVar[frozenset[str]] = Sim.offers
    engine: ClassVar[str] = Sim.name

    def __init__(self, sim: Sim, size: int, batons: Batons) -> None:
        super().__init__(size)
        self._latency_s = seconds(sim.latency, "latency")
        self._byte_s = 1 / bytes_per_second(sim.bandwidth, "bandwidth")
        self._serve_s = seconds(sim.serve, "serve")
        self.memory_byte_s = 1 / bytes_per_second(sim.memory, "memory")
        self.domains = domains_of(sim.domains, sim.memory, sim.controller, sim.far)
        self.window, self.block = sim.window, sim.block
        self._workers = sim.workers or size
        self.random = [random.Random(f"{sim.seed}/{r}") for r in range(size)]
        self._compute = [compute_model(sim.compute, rng, r, sim.seed) for r, rng in enumerate(self.random)]
        self.gradients = [0] * size
        """That each rank has begun."""
        self.measured = sim.compute == "measured"
        self._gradient: list[tuple[float, float] | None] = [None] * size  # under way: when it is done, what it costs
        self._slow = slowdowns(sim.stragglers, self._workers, size)
        self._cores = Cores(sim.cores) if 0 < sim.cores < size else None
        self.tie_random = random.Random(sim.ties)
        self._tie = self.tie_random.random if sim.ties else lambda: 0.0

        self.now_s = [0.0] * size
        self.free = [False] * size
        self._priced = [False] * size
        """Inside what the model prices, where nothing is measured."""
        self._counted_s = [0.0] * size
        self._out_free_s = [0.0] * size
        self._in_free_s = [0.0] * size
        self._incoming: list[list[tuple[float, int, float, Envelope]]] = [[] for _ in range(size)]
        """Of each card, in the order in which they come in: when one reaches it, its number, and how long it takes."""
        self._busy_until_s: dict[int, float] = {}  # by communicator: when its last collective is over

        self._heap: list[tuple[float, float, int, int]] = []
        self._ticket = [0] * size  # only a rank's newest heap entry counts
        self._batons = batons
        # Who runs holds the baton. Of what does nothing more, a lock that its own thread has anyway is the quickest
        self._held: AbstractContextManager[Any] = RLock() if isinstance(batons, WithinOneThread) else nullcontext()
        self._waits: list[Wait | None] = [None] * size
        self._give_up_s = [math.inf] * size
        self._finished = [False] * size
        self._running = 0
        self._deadlock = ""
        self.common: Any = None
        """What the ranks have in common."""
        self._returning: dict[int, float] = {}  # who comes back from a pause, and to which time

    def begin(self) -> None:
        for rank in range(self.size):
            self._schedule(rank, 0.0)
        self._hand_over()

    # The baton.

    def _schedule(self, rank: int, at_s: float) -> None:
        self._ticket[rank] += 1
        heapq.heappush(self._heap, (at_s, self._tie(), rank, self._ticket[rank]))

    def _pop(self) -> int | None:
        """The rank that runs next, its clock moved on; None when nobody can."""
        while self._heap:
            at_s, _, rank, ticket = heapq.heappop(self._heap)
            if ticket == self._ticket[rank]:
                self.now_s[rank] = max(at_s, self.now_s[rank])
                self._running = rank
                return rank
        return None

    def _hand_over(self, me: int | None = None) -> bool:
        """Give the baton to the next rank. True if that is `me`."""
        if self.aborted:
            self._wake_all()
        rank = self._pop()
        if rank is None and not all(self._finished):
            self._deadlock = self._who_waits()
            self._wake_all()
            rank = self._pop()
        if rank is not None and rank != me:
            self._batons.give(rank)
        return rank is not None and rank == me

    def _pause_here(self, me: int) -> None:
        """Let others run until it is this rank's turn again."""
        if not self._hand_over(me):
            self._batons.wait(me)
        if self._deadlock:
            raise CommError(self._deadlock)
        self.check()

    def _wake_all(self) -> None:
        for rank in range(self.size):
            if self._waits[rank] is not None and not self._finished[rank]:
                self._schedule(rank, self.now_s[rank])

    def _who_waits(self) -> str:
        lines = [
            f"rank {r} waits for {w.peers()} in {w.operation} since {self.now_s[r]:.6f} s"
            for r, w in enumerate(self._waits)
            if w is not None and not self._finished[r]
        ]
        done = [str(r) for r, finished in enumerate(self._finished) if finished]
        if done:
            lines.append(f"finished: rank {', '.join(done)}")
        return "deadlock: " + "; ".join(lines)

    def carriers(self, body: Body) -> list[Callable[[], None]]:
        return self._batons.carriers(body)

    def thread_began(self, rank: int) -> None:
        self._batons.wait(rank)
        self.count_from_here(rank)
        self.check()

    def thread_ended(self, rank: int) -> None:
        self._finished[rank] = True
        self._waits[rank] = None
        self._hand_over()

    # What a World offers.

    def exclusive(self) -> AbstractContextManager[None]:
        return self._unmeasured() if self.measured else self._held

    @contextmanager
    def _unmeasured(self) -> Iterator[None]:
        """Inside, time is what the model says: what came before is paid for, what is done here is not measured."""
        rank = self._running
        self.settle(rank)
        self._priced[rank] = True
        try:
            yield
        finally:
            self._priced[rank] = False
            self.count_from_here(rank)

    def abort(self) -> None:
        # May be called without the baton: whoever holds it wakes the rest when it hands over.
        self.aborted = True

    def changed(self, ranks: Sequence[int]) -> None:
        for r in ranks:
            what = self._waits[r]
            if what is not None and (ready_s := what.ready()) is not None:
                self._schedule(r, min(ready_s, self._give_up_s[r]))

    def wait(self, rank: int, what: Wait, timeout: float | None) -> bool:
        self._give_up_s[rank] = math.inf if timeout is None else self.now_s[rank] + timeout
        while True:
            ready_s = what.ready()
            if ready_s is not None and ready_s <= self.now_s[rank]:
                return True
            if self.now_s[rank] >= self._give_up_s[rank]:
                return False
            wake_s = min(math.inf if ready_s is None else ready_s, self._give_up_s[rank])
            if wake_s < math.inf:
                self._schedule(rank, wake_s)
            self._waits[rank] = what
            self._pause_here(rank)
            self._waits[rank] = None

    def clock(self, rank: int) -> SimClock:
        return SimClock(self, rank)

    def turns(self, rank: int) -> SimTurns | None:
        return None if self.measured else SimTurns(self, rank)

    # What things cost.

    def charge(self, rank: int, share: float, done: float) -> None:
        if self.measured:
            self.settle(rank)
        else:
            self._charge_drawn(rank, share, done)

    def _charge_drawn(self, rank: int, share: float, done: float) -> None:
        """A gradient's time is drawn, and its core taken, when the first part of it is complete."""
        under_way = self._gradient[rank]
        if under_way is None:
            cost_s = (self._compute[rank](self.gradients[rank]) or 0.0) * share * self._slow[rank]
            self.gradients[rank] += 1
            under_way = (self._done_s(rank, cost_s), cost_s)
        self._gradient[rank] = None if done == 1 else under_way
        done_s, cost_s = under_way
        if not self.free[rank]:
            self.now_s[rank] = max(self.now_s[rank], done_s - cost_s * (1 - FORWARD) * (1 - done))

    def _done_s(self, rank: int, cost_s: float) -> float:
        """When a rank that now begins to compute for so long will be done."""
        if self._cores is None or self.free[rank]:
            return self.now_s[rank] + cost_s
        self.catch_up(rank)
        return self._cores.take(self.now_s[rank], cost_s)

    def settle(self, rank: int) -> None:
        """Where compute times are measured: pay for what this thread did since it last paid."""
        if not self.measured:
            return
        if not self.free[rank] and not self._priced[rank]:
            took_s = time.thread_time() - self._counted_s[rank]
            self.now_s[rank] = self._done_s(rank, took_s * self._slow[rank])
        self.count_from_here(rank)

    def count_from_here(self, rank: int) -> None:
        """For measured compute times: what this thread did until now is paid for, or free."""
        if self.measured:  # the system takes a microsecond to say it
            self._counted_s[rank] = time.thread_time()

    def spend(self, rank: int, cost_s: float) -> None:
        """Something other than a gradient took this long."""
        if not self.free[rank]:
            self.now_s[rank] += cost_s

    def received(self, rank: int, envelope: Envelope) -> None:
        """A server sees to each message; where compute is measured, so is that."""
        if rank >= self._workers and not self.measured and not self.free[rank] and not envelope.free:
            passes_s = SERVER_PASSES * envelope.nbytes * self.memory_byte_s
            self.now_s[rank] = self._done_s(rank, self._serve_s + passes_s)

    def make_shared(self, sharing: Sharing, x: Tensor) -> SimulatedMemory:
        return SimulatedMemory(self, sharing, x)

    def shared_by(self, memory: SimulatedMemory, rank: int, worker: int) -> SharedVector:
        return SimulatedVector(memory, rank, worker)

    def catch_up(self, rank: int) -> None:
        """Ranks compute ahead of each other; before one sends or receives, all earlier ones must have run.

        A collective needs no such care: what comes of it does not depend on who arrives first.
        """
        if self._heap and self._heap[0][0] < self.now_s[rank]:
            self._schedule(rank, self.now_s[rank])
            self._pause_here(rank)

    def line_up(self, rank: int) -> None:
        self._schedule(rank, self.now_s[rank])
        self._pause_here(rank)

    def come_back(self, rank: int, at_s: float, ranks: int) -> None:
        """Go back to the time before a pause, when all who made it are through with it."""
        self._returning[rank] = at_s
        self._waits[rank] = Wait("pause", lambda: "others", lambda: None)
        if len(self._returning) == ranks:
            for r, back_s in self._returning.items():
                self.now_s[r] = back_s
                self._schedule(r, back_s)
            self._returning = {}
        self._pause_here(rank)
        self._waits[rank] = None

    def post(self, source: int, to: int, envelope: Envelope) -> float:
        """A message leaves when the sender's card is free, and the receiver's card takes messages in as they come."""
        now_s = self.now_s[source]
        envelope.free = self.free[source]
        if envelope.free or source == to:
            envelope.arrival_s = now_s
            return now_s
        wire_s = envelope.nbytes * self._byte_s
        leave_s = max(now_s, self._out_free_s[source])
        self._out_free_s[source] = leave_s + wire_s
        self._take_in(to, now_s)
        # Until a message has begun to come in, one that was sent later may still overtake it on the way.
        incoming, entry = self._incoming[to], (leave_s + self._latency_s, envelope.order, wire_s, envelope)
        at = bisect(incoming, entry)
        incoming.insert(at, entry)
        free_s = incoming[at - 1][3].arrival_s if at else self._in_free_s[to]
        for reach_s, _, wire_s, waiting in islice(incoming, at, None):
            free_s = waiting.arrival_s = max(reach_s, free_s) + wire_s
        return self._out_free_s[source]

    def _take_in(self, to: int, now_s: float) -> None:
        """Settle the messages that have begun to come in: nothing sent from now on can reach the card before them."""
        incoming = self._incoming[to]
        while incoming and incoming[0][0] <= now_s:
            self._in_free_s[to] = incoming.pop(0)[3].arrival_s

    def meeting_ends(self, last: int, context: int, arrived_s: float, kind: str, nbytes: int, size: int) -> float:
        """Collectives that are under way at once share the wires: each begins when the one before it is over."""
        if self.free[last]:
            return arrived_s
        begins_s = max(arrived_s, self._busy_until_s.get(context, 0.0))
        ends_s = begins_s + collective_s(kind, nbytes, size, self._latency_s, self._byte_s)
        self._busy_until_s[context] = ends_s
        return ends_s
