"""A communicator that counts: bytes, and the time spent sending, waiting for others and transferring."""

from __future__ import annotations

import math
from array import array
from functools import partial

import torch
from torch import Tensor

from hocket.core.clock import Clock
from hocket.core.comm import ANY, Comm, Deferred, Op, Request, receiving, ring_bytes
from hocket.core.errors import CommError
from hocket.core.forward import Forwarding
from hocket.core.message import Message
from hocket.core.state import State
from hocket.core.status import Status
from hocket.measure.trace import Trace

BLOCK = 65_536
"""Collectives after which the ranks compare their times, so that a long run needs no more memory than a short one."""


class Totals(State):
    """What one rank has sent, and where its time went."""

    bytes_sent: int
    messages: int
    sending_s: float
    waiting_s: float
    transferring_s: float
    hidden_s: float
    """Data travelled while the rank went on with something else."""

    def __init__(self) -> None:
        super().__init__(bytes_sent=0, messages=0, sending_s=0.0, waiting_s=0.0, transferring_s=0.0, hidden_s=0.0)

    def blocked(self, took_s: float, until_all_are_here_s: float) -> None:
        """A rank was blocked: it waited until the last that it needed was there, and from then on data travelled."""
        waited_s = min(max(until_all_are_here_s, 0.0), took_s)
        self.waiting_s += waited_s
        self.transferring_s += took_s - waited_s


class Metered(Forwarding):
    """Decorates a communicator. Strategies do not know that it is there.

    Bytes are those that a strategy hands over: a message's whole size, and for a collective what a
    bandwidth-optimal algorithm sends. To hand a message over is sending. A blocked receive is waiting until its sender
    began to send, a blocked collective until the last rank entered it; all after that is transferring.
    """

    def __init__(self, comm: Comm, clock: Clock, status: Status, trace: Trace, totals: Totals | None = None) -> None:
        super().__init__(comm)
        self._clock, self._status, self._trace = clock, status, trace
        self.totals = totals or Totals()
        self.ahead_s = 0.0
        """Of this host's clock over rank 0's."""
        self._met = array("d")
        """Of each collective: when this rank entered it, when it was blocked in it, and how long; and when it was over,
        if it may have been while the rank did something else."""
        self._blocks = 0
        self._over = 0.0
        """When the last collective in the background was."""
        self._children: list[Metered] = []

    def _begin(self, operation: str) -> float:
        now = self._clock.now()
        self._status.operation, self._status.since = operation, now
        return now

    def _end(self, began: float) -> float:
        """Returns the seconds since `began`."""
        now = self._clock.now()
        self._status.operation, self._status.since = "compute", now
        return now - began

    def set_ahead(self, ahead_s: float) -> None:
        """How far this host's clock is ahead: of this communicator, and of all that came from it."""
        self.ahead_s = ahead_s
        for child in self._children:
            child.set_ahead(ahead_s)

    def common(self, at: float) -> float:
        """A moment on the clock of all ranks."""
        return self._clock.common(at) - self.ahead_s

    # Messages

    def send(self, to: int, msg: Message, tag: int = 0) -> None:
        began = self._begin(f"send(to={to})")
        msg.posted_s = self.common(began)
        self.inner.send(to, msg, tag)
        self._sent(began, to, msg)

    def isend(self, to: int, msg: Message, tag: int = 0) -> Request:
        began = self._begin(f"isend(to={to})")
        msg.posted_s = self.common(began)
        request = self.inner.isend(to, msg, tag)
        self._sent(began, to, msg)
        return Deferred(partial(self._see_off, request, to))

    def _sent(self, began: float, to: int, msg: Message) -> None:
        took = self._end(began)
        self.totals.messages += 1
        self.totals.bytes_sent += msg.nbytes
        self.totals.sending_s += took
        self._trace.add("send", began, began + took, bytes=msg.nbytes, peer=to, kind=msg.kind)

    def _see_off(self, request: Request, to: int) -> None:
        began = self._begin(f"send(to={to})")
        request.wait()
        self.totals.sending_s += self._end(began)

    def recv(self, source: int = ANY, tag: int = 0, timeout: float | None = None) -> tuple[int, Message]:
        began = self._begin(receiving(source, tag))
        posted, about, failed = math.inf, {}, False
        try:
            sender, msg = self.inner.recv(source, tag, timeout)
            posted, about = msg.posted_s, {"peer": sender, "kind": msg.kind}
            return sender, msg
        except CommError:
            failed = True  # others are told what this rank was in, so its status stays
            raise
        finally:
            took = self._clock.now() - began if failed else self._end(began)
            self.totals.blocked(took, posted - self.common(began))
            if self._trace.fine and about:
                about["waited"] = posted - self.common(began)
            self._trace.add("recv", began, began + took, bytes=0, **about)

    # Collectives

    def _end_collective(self, operation: str, began: float, nbytes: int) -> None:
        took = self._end(began)
        self._count(operation, began, began + took, nbytes)
        entered = self.common(began)
        self._keep(entered, entered, took)

    def _count(self, operation: str, began: float, ended: float, nbytes: int) -> None:
        self.totals.bytes_sent += nbytes
        self._trace.add(operation, began, ended, bytes=nbytes)

    def _keep(self, entered: float, blocked: float, took: float) -> None:
        if len(self._met) == 4 * BLOCK:  # as it is on all ranks, at the same collective
            with self._clock.paused():
                self._compare()
        self._met.extend((entered, blocked, took, -math.inf))

    def settle(self) -> None:
        """Split the time in collectives into waiting and transferring. All ranks call it together."""
        for child in self._children:
            child.settle()
        self._compare()

    def _compare(self) -> None:
        if not self._met:
            return
        entered, blocked, took, over = torch.tensor(self._met, dtype=torch.float64).view(-1, 4).T.contiguous()
        last = entered.clone()
        self.inner.all_reduce(last, "max")
        waited = (last - blocked).clamp(min=0).minimum(took)
        self.totals.waiting_s += float(waited.sum())
        self.totals.transferring_s += float((took - waited).sum())
        # One after the other: a collective travels when all are there and the one before it is over
        before = torch.cat([over.new_tensor([-math.inf]), over.cummax(0).values[:-1]])
        self.totals.hidden_s += float((over - last.maximum(before) - (took - waited)).clamp(min=0).sum())
        self._met = array("d")
        self._blocks += 1

    def all_reduce(self, x: Tensor, op: Op = "sum") -> None:
        began = self._begin("all_reduce")
        self.inner.all_reduce(x, op)
        self._end_collective("all_reduce", began, ring_bytes(x.numel(), x.element_size(), self.size, self.rank))

    def iall_reduce(self, x: Tensor, op: Op = "sum") -> Request:
        """To start it is sending; what is blocked is the wait for its end."""
        posted = self._begin("all_reduce")
        request = self.inner.iall_reduce(x, op)
        took = self._end(posted)
        self.totals.sending_s += took
        self._trace.add("send", posted, posted + took, bytes=0, kind="to the background")
        self._keep(self.common(posted), 0.0, 0.0)
        block, at = self._blocks, len(self._met)

        def finish() -> None:
            began = self._begin("all_reduce")
            request.wait()
            took = self._end(began)
            self._trace.add("wait", began, began + took)
            over = min(request.ended_s - self._clock.common(0.0), began + took)
            nbytes = ring_bytes(x.numel(), x.element_size(), self.size, self.rank)
            self._count("background", max(posted, self._over), over, nbytes)
            self._over = over
            if block == self._blocks:
                self._met[at - 3 : at] = array("d", (self.common(began), took, self.common(over)))
            else:  # the ranks have compared in between, so all had entered
                self.totals.transferring_s += took

        return Deferred(finish)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op = "sum") -> None:
        began = self._begin("reduce_scatter")
        self.inner.reduce_scatter(out, x, op)
        self._end_collective("reduce_scatter", began, (self.size - 1) * out.numel() * out.element_size())

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        began = self._begin("all_gather")
        self.inner.all_gather(out, x)
        self._end_collective("all_gather", began, (self.size - 1) * x.numel() * x.element_size())

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        began = self._begin("broadcast")
        self.inner.broadcast(x, root)
        sent = (self.size - 1) * x.numel() * x.element_size() if self.rank == root else 0
        self._end_collective("broadcast", began, sent)

    def barrier(self) -> None:
        began = self._begin("barrier")
        self.inner.barrier()
        self._end_collective("barrier", began, 0)

    def split(self, color: int, key: int = 0) -> Comm:
        began = self._begin("split")
        part = super().split(color, key)
        self._end_collective("split", began, 0)
        return part

    def around(self, comm: Comm) -> Comm:
        child = Metered(comm, self._clock, self._status, self._trace, self.totals)
        child.ahead_s = self.ahead_s
        self._children.append(child)
        return child
