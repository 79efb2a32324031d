"""Elastic averaging: workers are tied to a common centre by springs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from hocket.core.errors import UserError
from hocket.core.message import Message
from hocket.core.server import Server
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
    needs: ClassVar[frozenset[Need]] = frozenset({"messages", "any-source", "collectives"})

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
        alpha, centre = self.beta / w.size, w.size
        while (g := (yield)) is not None:
            w.descend(g)
            if w.step % self.every == 0:
                w.world.isend(centre, Message("replica", (), (w.x,)))
                _, answer = w.world.recv(centre)
                w.x.lerp_(answer.tensors[0], alpha)  # x_i <- x_i - alpha (x_i - centre)
        w.world.isend(centre, Message("done"))
        w.x.copy_(w.world.recv(centre)[1].tensors[0])  # the farewell: everyone leaves with the centre
        w.average_buffers()

    def server(self, s: Server) -> None:
        alpha = self.beta / s.workers
        active = list(range(s.workers))  # in the order of their turns
        replicas = {}
        while active:
            worker, msg = s.comm.recv()
            match msg.kind:
                case "replica":
                    replicas[worker] = msg.tensors[0]
                case "done":
                    active.remove(worker)
            while replicas and active:
                turn = active[0] if self.order == "round-robin" else next(iter(replicas))
                if turn not in replicas:
                    break
                s.comm.isend(turn, Message("centre", (), (s.x,)))
                s.x.lerp_(replicas.pop(turn), alpha)  # centre <- centre + alpha (x_i - centre)
                s.version += 1
                s.log("pull", worker=turn, version=s.version)
                active.append(active.pop(active.index(turn)))
        for i in range(s.workers):
            s.comm.isend(i, Message("centre", (), (s.x,))).wait()
