"""A communicator that counts: bytes, and the time spent communicating and waiting."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from hocket.core.clock import Clock
from hocket.core.comm import ANY, Comm, Counter, Deferred, Op, Request, ring_bytes
from hocket.core.message import Message
from hocket.core.sharing import SharedVector, Sharing
from hocket.core.status import Status
from hocket.measure.trace import Trace


@dataclass
class Totals:
    """What one rank has sent, and where its time went."""

    bytes_sent: int = 0
    messages: int = 0
    communication_s: float = 0.0
    waiting_s: float = 0.0


class Metered:
    """Decorates a communicator. Strategies do not know that it is there.

    Bytes are those that a strategy hands over: a message's whole size, and for a collective what a
    bandwidth-optimal algorithm sends. A blocked receive is waiting, a send is communication. In a
    collective the last rank to arrive waits for nobody: what it needed is communication for all, and
    what a rank spent beyond that is waiting.
    """

    def __init__(self, comm: Comm, clock: Clock, status: Status, trace: Trace, totals: Totals | None = None) -> None:
        self._comm, self._clock, self._status, self._trace = comm, clock, status, trace
        self.rank, self.size = comm.rank, comm.size
        self.totals = totals or Totals()
        self._collectives_s = array("d")
        self._children: list[Metered] = []

    def _begin(self, operation: str) -> float:
        now = self._clock.now()
        self._status.operation, self._status.since = operation, now
        return now

    def _end(self, operation: str, began: float, nbytes: int, peer: int = ANY, kind: str = "") -> float:
        now = self._clock.now()
        self._status.operation, self._status.since = "compute", now
        self.totals.bytes_sent += nbytes
        if peer == ANY:
            self._trace.add(operation, began, now, bytes=nbytes)
        else:
            self._trace.add(operation, began, now, bytes=nbytes, peer=peer, kind=kind)
        return now - began

    def _end_collective(self, operation: str, began: float, nbytes: int) -> None:
        self._collectives_s.append(self._end(operation, began, nbytes))

    def settle(self) -> None:
        """Split the time in collectives into communication and waiting. All ranks call it together."""
        for child in self._children:
            child.settle()
        if self._collectives_s:
            mine = torch.tensor(self._collectives_s, dtype=torch.float64)
            last_to_arrive = mine.clone()
            self._comm.all_reduce(last_to_arrive, "min")
            self.totals.communication_s += float(last_to_arrive.sum())
            self.totals.waiting_s += float((mine - last_to_arrive).sum())
            self._collectives_s = array("d")

    def send(self, to: int, msg: Message, tag: int = 0) -> None:
        began = self._begin(f"send(to={to})")
        self._comm.send(to, msg, tag)
        self._sent(began, to, msg)

    def isend(self, to: int, msg: Message, tag: int = 0) -> Request:
        began = self._begin(f"isend(to={to})")
        request = self._comm.isend(to, msg, tag)
        self._sent(began, to, msg)
        return request

    def _sent(self, began: float, to: int, msg: Message) -> None:
        self.totals.messages += 1
        self.totals.communication_s += self._end("send", began, msg.nbytes, to, msg.kind)

    def recv(self, source: int = ANY, tag: int = 0, timeout: float | None = None) -> tuple[int, Message]:
        began = self._begin(f"recv(source={'ANY' if source == ANY else source}, tag={tag})")
        sender, msg = ANY, Message()
        try:
            sender, msg = self._comm.recv(source, tag, timeout)
        finally:
            self.totals.waiting_s += self._end("recv", began, 0, sender, msg.kind)
        return sender, msg

    def all_reduce(self, x: Tensor, op: Op = "sum") -> None:
        began = self._begin("all_reduce")
        self._comm.all_reduce(x, op)
        self._end_collective("all_reduce", began, ring_bytes(x.numel(), x.element_size(), self.size, self.rank))

    def iall_reduce(self, x: Tensor, op: Op = "sum") -> Request:
        request = self._comm.iall_reduce(x, op)

        def finish() -> None:
            began = self._begin("all_reduce")
            request.wait()
            sent = ring_bytes(x.numel(), x.element_size(), self.size, self.rank)
            self._end_collective("all_reduce", began, sent)

        return Deferred(finish)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op = "sum") -> None:
        began = self._begin("reduce_scatter")
        self._comm.reduce_scatter(out, x, op)
        self._end_collective("reduce_scatter", began, (self.size - 1) * out.numel() * out.element_size())

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        began = self._begin("all_gather")
        self._comm.all_gather(out, x)
        self._end_collective("all_gather", began, (self.size - 1) * x.numel() * x.element_size())

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        began = self._begin("broadcast")
        self._comm.broadcast(x, root)
        sent = (self.size - 1) * x.numel() * x.element_size() if self.rank == root else 0
        self._end_collective("broadcast", began, sent)

    def barrier(self) -> None:
        began = self._begin("barrier")
        self._comm.barrier()
        self._end_collective("barrier", began, 0)

    def split(self, color: int, key: int = 0) -> Comm:
        began = self._begin("split")
        part = self._comm.split(color, key)
        self._end_collective("split", began, 0)
        child = Metered(part, self._clock, self._status, self._trace, self.totals)
        self._children.append(child)
        return child

    def counter(self) -> Counter:
        return self._comm.counter()

    def share(self, sharing: Sharing, x: Tensor) -> SharedVector:
        return self._comm.share(sharing, x)
