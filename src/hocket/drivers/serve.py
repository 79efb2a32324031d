"""The life of a server rank."""

from __future__ import annotations

from typing import Any

import torch

from hocket import optim
from hocket.core.comm import Comm, Rank
from hocket.core.replica import Replica
from hocket.core.serving import Server, parts
from hocket.drivers.plan import Plan
from hocket.drivers.schedule import Rate
from hocket.measure.meter import Metered
from hocket.measure.trace import Trace
from hocket.tasks import Task


def serve(rank: Rank, servers: Comm, plan: Plan, task: Task, steps_per_epoch: int) -> dict[str, Any]:
    """The life of a server rank: a part of the vector, and the strategy's server."""
    model = Replica(task.build_model(plan.seed))
    x = parts(model.x, servers.size)[servers.rank]
    g = torch.zeros_like(x)
    optimizer = optim.make_flat(plan.optimizer, x, g, plan.lr, plan.momentum)
    begin_together(rank, model)
    strategy = plan.made_strategy
    rate = Rate(plan, optimizer, steps_per_epoch)
    updates_per_step = 1 if strategy.lockstep else plan.workers
    trace = Trace(plan.trace)
    began_s = trace.origin_s = rank.clock.now()
    comm = Metered(rank.comm, rank.clock, rank.status, trace)

    descend = optim.step_of(optimizer)

    def log(event: str, **fields: Any) -> None:
        now = rank.clock.now()
        trace.add(event, now, now, **fields)

    def step() -> None:
        rate.set(1 + server.version // updates_per_step)
        descend()
        rank.status.step += 1

    server = Server(comm, rank.clock, plan.workers, x, g, step, log)
    strategy.server(server)
    seconds = rank.clock.now() - began_s
    rank.tell("events", {"events": trace.take()}, b"")
    return {
        "server": servers.rank,
        "seconds": seconds,
        "communication": comm.totals.communication_s,
        "waiting": comm.totals.waiting_s,
        "bytes_sent": comm.totals.bytes_sent,
        "messages": comm.totals.messages,
        "staleness": {str(k): v for k, v in server.staleness.items()},
        "dropped_events": trace.dropped,
    }


def begin_together(rank: Rank, model: Replica) -> None:
    """Everyone sets out from rank 0's weights, at the same time."""
    with rank.clock.paused():
        for tensor in [model.replica, *model.rest()]:
            rank.comm.broadcast(tensor)  # a Task may hold a module with weights of its own
        rank.comm.barrier()
