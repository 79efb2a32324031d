"""Decentralised SGD: workers average with a few others, and no one ever hears from all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hocket.core.errors import UserError
from hocket.core.message import Lossy, Message
from hocket.core.staleness import Handling, Staleness
from hocket.core.state import State
from hocket.core.weight import Weight
from hocket.core.worker import Need, Steps, Strategy, Worker, strategy

Graph = Literal["ring", "torus", "exponential", "complete"]


@strategy("gossip")
@dataclass(frozen=True)
class Gossip(Strategy):
    """Average with neighbours only: D-PSGD, AD-PSGD (Lian 2017, 2018), SGP (Assran 2019), pull, push (Jin 2016)."""

    fewest_workers: ClassVar[int] = 2
    kind: Literal["dpsgd", "adpsgd", "sgp", "pull", "push"] = "dpsgd"
    graph: Graph = "ring"
    """Who is whose neighbour, for dpsgd and adpsgd; sgp has its own directed one, pull and push choose at random."""
    together: bool = False
    """For pull and push: all take each step together, in place of nobody waiting for anyone."""
    stale: Handling = "none"
    """For adpsgd: how a gradient is tempered by the averages that came between its read and its step."""

    @property
    def needs(self) -> frozenset[Need]:
        if self.lockstep:
            return frozenset({"messages", "collectives"})
        return frozenset({"messages", "collectives", "any-source", "polling"})

    def check(self, workers: int) -> None:
        if workers < 2:
            raise UserError(f"gossip needs 2 or more workers, got {workers}; use --strategy serial")
        if self.kind in ("dpsgd", "adpsgd"):
            neighbours(self.graph, workers, 0)
        if self.kind == "adpsgd" and self.graph not in ("ring", "complete"):
            raise UserError(
                f"gossip: adpsgd pairs even with odd ranks, which cuts graph={self.graph}; use ring or complete"
            )
        if self.together and self.kind not in ("pull", "push"):
            raise UserError(f"gossip: together is for pull and push; leave it out in kind={self.kind}")
        if self.stale != "none" and self.kind != "adpsgd":
            raise UserError(f"gossip: nothing is stale in kind={self.kind}; leave stale out, or use kind=adpsgd")

    def idle(self) -> Mapping[str, str]:
        return {} if self.kind in ("dpsgd", "adpsgd") else {"graph": "kind"}

    @property
    def lockstep(self) -> bool:
        return self.together or self.kind in ("dpsgd", "sgp")

    def worker(self, w: Worker) -> Steps:
        match self.kind:
            case "dpsgd":
                yield from self.dpsgd(w)
            case "adpsgd":
                yield from self.pairwise(w)
            case "sgp":
                yield from self.push_sum(w)
            case "pull" | "push" if self.together:
                yield from self.random_peers_together(w)
            case "pull" | "push":
                yield from self.random_peers(w)
        w.average_replicas(Weight(1, w.size))  # the farewell: everyone leaves with one model

    def part(self, w: Worker) -> tuple[Tensor, float]:
        return (w.kept("x") if self.kind == "sgp" else w.x), 1.0

    def dpsgd(self, w: Worker) -> Steps:
        """x_i <- sum_j W_ij x_j, then a step along the gradient at x_i before the mixing (algorithm 1).

        All have equally many neighbours and weigh them and themselves alike, so W is doubly stochastic.
        """
        near = neighbours(self.graph, w.size, w.rank)
        while (g := (yield)) is not None:
            told = {j: w.seal(j, model_of(w)) for j in near}
            models = {j: Message("model", (), (told[j], w.model.buffers)) for j in near}
            mix(w, exchange(w, models, near), list(told.values()))
            w.descend(g)

    def pairwise(self, w: Worker) -> Steps:
        """Two neighbours average, and nobody else waits: x_i, x_j <- (x_i + x_j) / 2 (AD-PSGD, algorithm 1).

        Even ranks ask odd ones, so that two never ask each other at once: each would answer with the other's old model,
        and they would change places instead of meeting. Who is asked answers between two gradients with half the
        difference d, x_j <- x_j - d, and who asked adds d when it hears of it. Nobody waits for an answer, and the sum
        of all models is the same before and after.
        """
        near = [j for j in neighbours(self.graph, w.size, w.rank) if (j + w.rank) % 2]
        asks = w.rank % 2 == 0
        staleness = w.keep("handling", Staleness(self.stale, w.size, w.x))
        # Neighbours that have no question of ours; that may still send
        idle, talking = w.keep("idle", set(near)), w.keep("talking", set(near))

        def listen(timeout: float | None) -> bool:
            """Handle one message, if there is any."""
            try:
                j, msg = w.comm.recv(timeout=timeout)
            except TimeoutError:
                return False
            match msg.kind:
                case "model":
                    answer(w, j, *msg.tensors)
                case "difference":
                    x, buffers = msg.tensors
                    w.x.add_(x)
                    w.model.buffers.add_(buffers)
                    idle.add(j)
                case "done":
                    talking.discard(j)
            return msg.kind != "done"

        while (g := (yield)) is not None:
            read, averages = w.x.clone() if staleness.needs_the_read() else None, 0
            while listen(0.0):
                averages += 1
            if asks and idle:
                j = sorted(idle)[int(torch.randint(len(idle), (1,), generator=w.rng))]
                idle.discard(j)
                w.comm.isend(j, replica_of(w))
            g.vector.copy_(staleness.temper(g.vector, w.lr, averages, w.x, read))
            w.descend(g, averages)
        if asks:
            while idle < set(near):
                listen(None)
            for j in near:
                w.comm.isend(j, Message("done"))
        else:
            while talking:
                listen(None)

    def push_sum(self, w: Worker) -> Steps:
        """The gradient is taken at z = x / weight; half of x and of the weight goes to one other (algorithm 1)."""
        x, weight = w.keep("x", w.x.clone()), w.keep("weight", w.x.new_ones(1))
        reach = math.ceil(math.log2(w.size))
        while (g := (yield)) is not None:
            before = w.x.clone()
            w.descend(g)
            x += w.x - before
            hop = 2 ** ((w.step - 1) % reach)
            to, source = (w.rank + hop) % w.size, (w.rank - hop) % w.size
            half, half_weight = w.seal(to, Lossy(x / 2, "half", is_model=True)), weight / 2
            ((x_in, weight_in),) = exchange(w, {to: Message("half", (), (half, half_weight))}, [source])
            x.sub_(half.values, alpha=w.mixing).add_(x_in, alpha=w.mixing)  # what does not arrive stays here
            weight.sub_(half_weight, alpha=w.mixing).add_(weight_in, alpha=w.mixing)
            torch.div(x, weight, out=w.x)
        w.x.copy_(x)  # the sum of all x is what was kept, and that of all weights is their number: not so for z

    def random_peers(self, w: Worker) -> Steps:
        """Pick one other each step, and wait for nobody (Jin 2016, gossiping SGD by pull and by push).

        Push: give it one's model, and average with all that have come. Pull: ask it for its model, and average with
        that when it is there; who is asked answers between two gradients.
        """
        others = [j for j in range(w.size) if j != w.rank]
        talking = w.keep("talking", set(others))  # those that may still send
        asked = w.keep("asked", State(unanswered=False))

        def hear(timeout: float | None) -> int:
            """Handle what has come, and without a time-out at least one message; how many models were among it."""
            models = []
            try:
                while True:
                    j, msg = w.comm.recv(timeout=timeout)
                    timeout = 0.0
                    match msg.kind:
                        case "ask":
                            w.comm.isend(j, replica_of(w))
                        case "model":
                            models.append(msg.tensors)
                            asked.unanswered = False
                        case "done":
                            talking.discard(j)
            except TimeoutError:
                mix(w, models)
                return len(models)

        while (g := (yield)) is not None:
            averages = hear(0.0)
            j = others[int(torch.randint(len(others), (1,), generator=w.rng))]
            if self.kind == "push":
                w.comm.isend(j, replica_of(w))
            elif not asked.unanswered:
                asked.unanswered = True
                w.comm.isend(j, Message("ask"))
            w.descend(g, averages)
        while asked.unanswered:
            hear(None)
        for j in others:
            w.comm.isend(j, Message("done"))
        while talking:
            hear(None)

    def random_peers_together(self, w: Worker) -> Steps:
        """The same in lockstep: all know who has picked whom, and wait for what they expect."""
        while (g := (yield)) is not None:
            # All draw the same choices, so that each knows who expects its model.
            offset = torch.randint(1, w.size, (w.size,), generator=w.common_rng)
            chosen = ((torch.arange(w.size) + offset) % w.size).tolist()
            choosers = [r for r in range(w.size) if chosen[r] == w.rank]
            to, sources = (choosers, [chosen[w.rank]]) if self.kind == "pull" else ([chosen[w.rank]], choosers)
            mix(w, exchange(w, dict.fromkeys(to, replica_of(w)), sources))
            w.descend(g)


def neighbours(graph: Graph, n: int, i: int) -> list[int]:
    """The neighbours of `i` in an undirected graph of `n` where all have equally many."""
    match graph:
        case "ring":
            near = {i - 1, i + 1}
        case "complete":
            near = set(range(n))
        case "exponential":
            near = {i + sign * 2**k for k in range(math.ceil(math.log2(n))) for sign in (-1, 1)}
        case "torus":
            rows = max((r for r in range(2, math.isqrt(n) + 1) if n % r == 0), default=0)
            if not rows:
                raise UserError(f"gossip: {n} workers form no torus; use a product of two numbers, or graph=ring")
            columns = n // rows
            row, column = divmod(i, columns)
            near = {row * columns + (column + d) % columns for d in (-1, 1)}
            near |= {(row + d) % rows * columns + column for d in (-1, 1)}
    return sorted({j % n for j in near} - {i})


def model_of(w: Worker) -> Lossy:
    return Lossy(w.x, "model", is_model=True)


def replica_of(w: Worker) -> Message:
    """A replica on its way: parameters, and statistics that must arrive as they are."""
    return Message("model", (), (model_of(w), w.model.buffers))


def answer(w: Worker, j: int, x: Tensor, buffers: Tensor) -> None:
    """Go half the way towards a neighbour's replica, and tell it how far that was."""
    d, d_buffers = (w.x - x) * (w.mixing / 2), (w.model.buffers - buffers) / 2
    difference = w.seal(j, Lossy(d, ""))  # what does not arrive stays here: both keep the sum
    w.comm.isend(j, Message("difference", (), (difference, d_buffers)))
    w.x.sub_(difference.values)
    w.model.buffers.sub_(d_buffers)


def mix(w: Worker, others: Sequence[tuple[Tensor, ...]], told: Sequence[Lossy] = ()) -> None:
    """Replace the replica by the mean of itself and the others, or go as far towards it as `w.mixing` allows.

    Each that was `told` something hears what may be less than the whole replica. To it one's own replica is that too,
    so that both move alike and the mean of all stays as it was (Koloskova 2019, algorithm 2).
    """
    x, untold = w.x.clone() if w.mixing < 1 else w.x, [w.x - part.values for part in told if part.packed]
    for heard, buffers in others:
        w.x += heard
        w.model.buffers += buffers
    for rest in untold:
        w.x += rest
    w.replica /= 1 + len(others)
    if w.mixing < 1:
        w.x.lerp_(x, 1 - w.mixing)


def exchange(w: Worker, messages: Mapping[int, Message], sources: Sequence[int]) -> list[tuple[Tensor, ...]]:
    """Send messages to some and receive theirs from others."""
    sending = [w.comm.isend(j, msg) for j, msg in messages.items()]
    received = [w.comm.recv(j)[1].tensors for j in sources]
    for request in sending:
        request.wait()
    return received
