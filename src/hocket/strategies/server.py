"""A parameter server: workers send gradients to it and get the parameters back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hocket.core.errors import UserError
from hocket.core.message import Lossy, Message
from hocket.core.replica import Gradient
from hocket.core.serving import Server, parts
from hocket.core.staleness import Handling, Staleness
from hocket.core.state import State
from hocket.core.worker import Need, Steps, Strategy, Worker, strategy
from hocket.strategies.pace import ANY, Pace
from hocket.strategies.views import Views


@strategy("server")
@dataclass(frozen=True)
class ParameterServer(Strategy):
    """Gradients go to a parameter server: synchronous, asynchronous (Dean 2012), stale-synchronous (Ho 2013)."""

    mode: Literal["sync", "async", "ssp", "dssp"] = "sync"
    """`sync` waits for all and averages; `async` applies each gradient as it comes; `ssp` does so too, and holds back a
    worker that is more than `slack` steps ahead of the slowest; `dssp` chooses the slack between `low` and `high` at
    run time (Zhao 2019)."""
    slack: int = 2
    low: int = 1
    high: int = 8
    servers: int = 1
    """Ranks beside the workers; the vector is shared out between them."""
    stale: Literal[Handling, "auto"] = "auto"
    """How stale gradients are tempered; `auto` is `gap-mean`, but `none` in mode=sync."""
    lookahead: float = 0.9
    """But in mode=sync: each worker holds momentum, so much at least (beyond 16 workers 1 - 1.6 / workers), and gets
    the parameters as they should be when its gradient arrives (DANA, Hakimi 2019). 0: the server holds the optimizer's
    momentum, and nobody looks ahead."""
    push_every: int = 1
    """Downpour: gradients that an asynchronous worker adds up before it sends them."""
    fetch_every: int = 1
    """Downpour: steps between two reads; a worker steps by itself in between."""
    pipeline: int = 0
    """1: an asynchronous worker computes its next gradient while its push, and the parameters that it gets for it, are
    on their way; so these are one read older."""

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"messages", "any-source", "collectives"})

    def check(self, workers: int) -> None:
        if self.slack < 0:
            raise UserError(f"server: slack must be 0 or more, got {self.slack}")
        if not 0 <= self.low <= self.high:
            raise UserError(f"server: 0 <= low <= high must hold, got low={self.low}, high={self.high}")
        if self.servers < 1:
            raise UserError(f"server: servers must be 1 or more, got {self.servers}")
        if self.stale not in ("auto", "none") and self.mode == "sync":
            raise UserError("server: nothing is stale in mode=sync; leave stale out, or use mode=async")
        if not 0 <= self.lookahead < 1:
            raise UserError(f"server: lookahead must be at least 0 and less than 1, got {self.lookahead:g}")
        for name in ("push_every", "fetch_every"):
            steps = getattr(self, name)
            if steps < 1:
                raise UserError(f"server: {name} must be 1 or more, got {steps}")
            if steps > 1 and self.mode != "async":
                raise UserError(
                    f"server: {name} is for mode=async; in mode={self.mode} workers push and read each step"
                )

        if self.pipeline not in (0, 1):
            raise UserError(f"server: pipeline is 0 or 1, got {self.pipeline}")
        if self.pipeline and (self.mode != "async" or self.push_every > 1 or self.fetch_every > 1):
            raise UserError("server: pipeline=1 is for mode=async, with a push and a read at each step")

    @property
    def lockstep(self) -> bool:
        return self.mode == "sync"

    @property
    def alike(self) -> bool:
        return self.lockstep

    def server_ranks(self) -> int:
        return self.servers

    def handling(self) -> Handling:
        if self.stale != "auto":
            return self.stale
        return "none" if self.mode == "sync" else "gap-mean"

    def ahead(self, workers: int) -> float:
        """How much of the parameters' last movement is expected to go on; nothing is stale for one worker alone."""
        if self.mode == "sync" or workers == 1 or self.lookahead == 0:
            return 0.0
        return max(self.lookahead, 1 - 1.6 / workers)  # the more there are, the steadier each must move to be foreseen

    def slacks(self) -> tuple[int, int]:
        """How many steps a worker may be ahead of the slowest: always, and at the most where that saves waiting."""
        match self.mode:
            case "ssp":
                return self.slack, self.slack
            case "dssp":
                return self.low, self.high
        return ANY, ANY

    def idle(self) -> Mapping[str, str]:
        used = {
            "sync": (),
            "async": ("lookahead",),
            "ssp": ("lookahead", "slack"),
            "dssp": ("lookahead", "low", "high"),
        }
        return dict.fromkeys({"slack", "low", "high", "lookahead"}.difference(used[self.mode]), "mode")

    def step_scale(self, workers: int) -> float:
        return 1 / workers if self.mode == "sync" else 1.0

    def worker(self, w: Worker) -> Steps:
        x, ranks = parts(w.x, self.servers), range(w.size, w.size + self.servers)
        ahead = self.ahead(w.size)
        read = w.keep("read", [0] * self.servers)  # the version of each part that the gradient is computed at
        # Since the last push: the sum of the gradients, the samples, and what the oldest was computed at
        total = w.keep("total", torch.zeros_like(w.x) if self.push_every > 1 else w.x.new_zeros(()))
        since = w.keep("since", State(samples=0, read=[0] * self.servers))
        velocity = w.keep("velocity", torch.zeros_like(w.x) if ahead else w.x.new_zeros(()))
        asked = w.keep("asked", State(reads=0))  # those that are on their way

        def push(gradient: Tensor, reply: bool) -> None:
            if ahead and since.samples:
                gradient = velocity.lerp_(gradient, 1 - max(ahead, w.momentum))
            hyperparameters = w.hyperparameters(momentum_elsewhere=bool(ahead))
            for k, part in enumerate(parts(gradient, self.servers)):
                ints = since.read[k], since.samples, int(reply)
                w.world.isend(ranks[k], Message("push", ints, (Lossy(part, f"push/{k}"), hyperparameters)))
            since.samples = 0

        def take() -> None:
            for k, rank in enumerate(ranks):
                _, model = w.world.recv(rank)
                x[k].copy_(model.tensors[0])
                read[k] = model.ints[0]
            asked.reads -= 1

        while (g := (yield)) is not None:
            pushes, fetches = w.step % self.push_every == 0, w.step % self.fetch_every == 0
            if since.samples == 0:
                since.read = list(read)
            since.samples += int(g.samples)
            gradient = self.weighed(w, g) if self.push_every == 1 else total.add_(self.weighed(w, g))
            if pushes:
                push(gradient, reply=fetches)
                if self.push_every > 1:
                    total.zero_()
            elif fetches:
                for rank in ranks:
                    w.world.isend(rank, Message("fetch"))
            if fetches:
                asked.reads += 1
                if asked.reads > self.pipeline:
                    take()
            else:
                w.descend(g)
        while asked.reads:
            take()
        if since.samples:
            push(total, reply=False)
        farewell(w, x, ranks)

    def weighed(self, w: Worker, g: Gradient) -> Tensor:
        """A gradient as much as it counts by itself; where all meet at the server, it weighs them."""
        portion = 1.0 if self.mode == "sync" else w.portion(g)
        return g.vector if portion == 1 else g.vector * portion

    def consensus(self, w: Worker) -> Tensor:
        return w.served()

    def server(self, s: Server) -> None:
        staleness = s.keep("handling", Staleness(self.handling(), s.workers, s.x, s.staleness, s.by_gap))
        pace = s.keep("pace", Pace(s, *self.slacks()))
        views = s.keep("views", Views(self.ahead(s.workers), s.x, s.workers, self.pipeline, s.looked_ahead))
        looks_back = staleness.needs_the_read() or self.ahead(s.workers) > 0
        pushed: dict[int, Message] = s.keep("pushed", {})  # sync: the gradients of this step
        waiting: set[int] = s.keep("waiting", set())  # workers that want the parameters
        for worker, msg in s.requests():
            match msg.kind:
                case "push":
                    pace.pushed(worker, s.clock.now())
                    _, _, reply = msg.ints
                    if reply:
                        waiting.add(worker)
                    if self.mode == "sync":
                        pushed[worker] = msg
                    else:
                        self.apply(s, staleness, worker, msg, views.pushed(worker))
                case "fetch":
                    views.held(worker)
                    waiting.add(worker)
            if self.mode == "sync" and pushed and pushed.keys() >= s.active:
                self.apply_mean(s, [pushed[i] for i in sorted(pushed)], staleness)
                pushed.clear()
            for i in [i for i in sorted(waiting) if i not in pushed and pace.may_go_on(i)]:
                waiting.discard(i)
                view = views.given(i, s.x) if looks_back else s.x
                model = s.seal(i, Lossy(view, "model", is_model=True))
                if model.packed:
                    views.newest[i] = model.values  # it will compute at what it finds
                s.comm.isend(i, Message("model", (s.version,), (model,)))
        for i in range(s.workers):
            s.comm.isend(i, Message("model", (s.version,), (s.x,))).wait()

    def apply(self, s: Server, staleness: Staleness, worker: int, push: Message, read: Tensor) -> None:
        version, samples, _ = push.ints
        if samples == 0:
            return
        gradient, hyperparameters = push.tensors
        tau = s.version - version
        s.tune(hyperparameters)
        s.descend(staleness.temper(gradient, s.reach, tau, s.x, read))
        s.log("update", worker=worker, read=version, version=s.version, staleness=tau)

    def apply_mean(self, s: Server, pushes: list[Message], staleness: Staleness) -> None:
        samples = [push.ints[1] for push in pushes]
        total = sum(samples)
        if total == 0:
            return
        weighted = zip(pushes, samples, strict=True)
        g = sum((push.tensors[0] * (n / total) for push, n in weighted), start=s.x.new_zeros(()))
        staleness.histogram[0] += 1
        s.tune(pushes[0].tensors[1])
        s.descend(g.expand_as(s.x))
        s.log("update", read=s.version - 1, version=s.version, staleness=0)


def farewell(w: Worker, x: Sequence[Tensor], servers: Sequence[int]) -> None:
    """Everyone leaves with one model; `x` is the parts of it that the servers hold."""
    for rank in servers:
        w.world.isend(rank, Message("done"))
    for part, rank in zip(x, servers, strict=True):
        part.copy_(w.world.recv(rank)[1].tensors[0])
    w.average_buffers()
