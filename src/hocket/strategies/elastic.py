"""Elastic averaging: workers are tied to a common centre by springs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from hocket.core.errors import UserError
from hocket.core.message import Lossy, Message
from hocket.core.serving import Server
from hocket.core.staleness import Handling, Staleness
from hocket.core.worker import Need, Steps, Strategy, Worker, strategy


@strategy("elastic")
@dataclass(frozen=True)
class Elastic(Strategy):
    """EASGD (Zhang 2015): every `every` steps a worker and the centre pull each other; with momentum, EAMSGD."""

    every: int = 10
    """Local steps between two pulls (tau)."""
    beta: float = 0.9
    """The pull of all workers together: each pulls with alpha = beta / workers."""
    order: Literal["async", "round-robin"] = "async"
    """Whose turn it is at the centre: whoever comes, or one after the other."""
    stale: Handling = "none"
    """How a pull is tempered by the number of pulls of others since the worker's last one."""

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"messages", "any-source", "collectives"})

    def check(self, workers: int) -> None:
        if self.every < 1:
            raise UserError(f"elastic: every must be 1 or more, got {self.every}")
        if not 0 < self.beta <= 1:
            raise UserError(f"elastic: beta must be greater than 0 and at most 1, got {self.beta:g}")

    @property
    def lockstep(self) -> bool:
        return False

    def server_ranks(self) -> int:
        return 1

    def worker(self, w: Worker) -> Steps:
        centre = w.size
        while (g := (yield)) is not None:
            if w.step % self.every == 0:  # both moves from the x at which the gradient was taken
                w.world.isend(centre, Message("replica", (), (Lossy(w.x, "replica", is_model=True),)))
                w.x -= w.world.recv(centre)[1].tensors[0]
            w.descend(g)
        w.world.isend(centre, Message("done"))
        w.x.copy_(w.world.recv(centre)[1].tensors[0])  # the farewell: everyone leaves with the centre
        w.average_buffers()

    def consensus(self, w: Worker) -> Tensor:
        return w.served()

    def server(self, s: Server) -> None:
        alpha = self.beta / s.workers
        turns = s.keep("turns", list(range(s.workers)))  # who was last at the centre comes last
        replicas: dict[int, Tensor] = s.keep("replicas", {})
        staleness = s.keep("handling", Staleness(self.stale, s.workers, s.x, s.staleness))
        seen = s.keep("seen", [0] * s.workers)  # the version of the centre when a worker was last there
        centres: dict[int, Tensor] = s.keep("centres", {})  # and the centre itself
        for worker, msg in s.requests():
            if msg.kind == "replica":
                replicas[worker] = msg.tensors[0]
            while replicas:
                turn = next(i for i in turns if i in s.active) if self.order == "round-robin" else next(iter(replicas))
                if turn not in replicas:
                    break
                tau = s.version - seen[turn]
                d = staleness.temper(alpha * (replicas.pop(turn) - s.x), 1.0, tau, s.x, centres.get(turn, s.x))
                pull = s.seal(turn, Lossy(d, ""))  # what does not arrive stays between the two: none need be kept
                s.comm.isend(turn, Message("pull", (), (pull,)))  # x_i <- x_i - d
                s.x += pull.values
                s.version += 1
                s.log("update", worker=turn, read=seen[turn], version=s.version, staleness=tau)
                seen[turn] = s.version
                if staleness.needs_the_read():
                    centres[turn] = s.x.clone()
                turns.append(turns.pop(turns.index(turn)))
        for i in range(s.workers):
            s.comm.isend(i, Message("centre", (), (s.x,))).wait()
