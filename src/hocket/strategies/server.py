"""A parameter server: workers send gradients to it and get the parameters back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from hocket.core.errors import UserError
from hocket.core.message import Message
from hocket.core.server import Server, parts
from hocket.core.staleness import Handling, Staleness
from hocket.core.worker import Need, Steps, Strategy, Worker, strategy


@strategy("server")
@dataclass(frozen=True)
class ParameterServer(Strategy):
    """Gradients go to a parameter server: synchronous, asynchronous (Dean 2012) or stale-synchronous (Ho 2013)."""

    mode: Literal["sync", "async", "ssp"] = "sync"
    """`sync` waits for all and averages; `async` applies each gradient as it comes; `ssp` does so too, by the
    worker's share |B_i| / n, and holds back a worker that is more than `slack` steps ahead of the slowest."""
    slack: int = 2
    servers: int = 1
    """Ranks beside the workers; the vector is shared out between them."""
    stale: Handling = "none"
    """How stale gradients are tempered."""
    needs: ClassVar[frozenset[Need]] = frozenset({"messages", "any-source", "collectives"})

    def check(self, workers: int) -> None:
        if self.slack < 0:
            raise UserError(f"server: slack must be 0 or more, got {self.slack}")
        if self.servers < 1:
            raise UserError(f"server: servers must be 1 or more, got {self.servers}")
        if self.stale != "none" and self.mode == "sync":
            raise UserError("server: nothing is stale in mode=sync; leave stale out, or use mode=async")

    @property
    def lockstep(self) -> bool:
        return self.mode == "sync"

    def server_ranks(self) -> int:
        return self.servers

    def worker(self, w: Worker) -> Steps:
        x, ranks = parts(w.x, self.servers), range(w.size, w.size + self.servers)
        read = [0] * self.servers  # the version of each part that the gradient is computed at
        while (g := (yield)) is not None:
            for k, part in enumerate(parts(g.vector, self.servers)):
                push = Message("push", (read[k], int(g.samples), int(g.of)), (part,))
                w.world.isend(ranks[k], push)
            for k, rank in enumerate(ranks):
                _, model = w.world.recv(rank)
                x[k].copy_(model.tensors[0])
                read[k] = model.ints[0]
        for rank in ranks:
            w.world.isend(rank, Message("done"))
        for k, rank in enumerate(ranks):  # the farewell: everyone leaves with one model
            x[k].copy_(w.world.recv(rank)[1].tensors[0])
        w.average_buffers()

    def server(self, s: Server) -> None:
        staleness = Staleness(self.stale, s.workers, s.staleness)
        active = set(range(s.workers))  # who is done holds nobody up
        clock = [0] * s.workers
        pushed: dict[int, Message] = {}  # workers that wait for an answer
        backup: dict[int, Tensor] = {}  # the parameters that a worker read
        while active:
            worker, msg = s.comm.recv()
            match msg.kind:
                case "push":
                    pushed[worker] = msg
                    clock[worker] += 1
                    if self.mode != "sync":
                        self.apply(s, staleness, worker, msg, backup.get(worker))
                case "done":
                    active.discard(worker)
            slowest = min((clock[i] for i in active), default=math.inf)
            match self.mode:
                case "sync":
                    ready = sorted(pushed) if pushed.keys() >= active else []
                    if ready:
                        self.apply_mean(s, [pushed[i] for i in ready], staleness)
                case "async":
                    ready = sorted(pushed)
                case "ssp":
                    ready = [i for i in sorted(pushed) if clock[i] - slowest <= self.slack]
            for i in ready:
                del pushed[i]
                if staleness.needs_the_read():
                    backup[i] = s.x.clone()
                s.comm.isend(i, Message("model", (s.version,), (s.x,)))
        for i in range(s.workers):
            s.comm.isend(i, Message("model", (s.version,), (s.x,))).wait()

    def apply(self, s: Server, staleness: Staleness, worker: int, push: Message, read: Tensor | None) -> None:
        version, samples, of = push.ints
        if samples == 0:
            return
        tau = s.version - version
        g = staleness.temper(push.tensors[0], tau, s.x, s.x if read is None else read)
        if self.mode == "ssp":
            g = g * (samples / of)
        s.descend(g)
        s.log("update", worker=worker, read=version, version=s.version, staleness=tau)

    def apply_mean(self, s: Server, pushes: list[Message], staleness: Staleness) -> None:
        total = sum(push.ints[1] for push in pushes)
        if total == 0:
            return
        g = sum((push.tensors[0] * (push.ints[1] / total) for push in pushes), start=s.x.new_zeros(()))
        staleness.histogram[0] += 1
        s.descend(g.expand_as(s.x))
        s.log("update", read=s.version - 1, version=s.version, staleness=0)
