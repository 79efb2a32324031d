"""Decorators of a communicator derive from here: each overrides what it is about, and the rest is passed on."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from hocket.core.comm import ANY, Comm, Counter, Op, Request
from hocket.core.message import Message
from hocket.core.sharing import SharedVector, Sharing


class Forwarding:
    """Does nothing of its own. What is split off is decorated alike."""

    def __init__(self, comm: Comm) -> None:
        self.inner = comm
        self.rank, self.size = comm.rank, comm.size

    def around(self, comm: Comm) -> Comm:
        """The same decoration of a communicator that was split off."""
        return comm

    def send(self, to: int, msg: Message, tag: int = 0) -> None:
        self.inner.send(to, msg, tag)

    def isend(self, to: int, msg: Message, tag: int = 0) -> Request:
        return self.inner.isend(to, msg, tag)

    def recv(self, source: int = ANY, tag: int = 0, timeout: float | None = None) -> tuple[int, Message]:
        return self.inner.recv(source, tag, timeout)

    def all_reduce(self, x: Tensor, op: Op = "sum") -> None:
        self.inner.all_reduce(x, op)

    def iall_reduce(self, x: Tensor, op: Op = "sum") -> Request:
        return self.inner.iall_reduce(x, op)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op = "sum") -> None:
        self.inner.reduce_scatter(out, x, op)

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        self.inner.all_gather(out, x)

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        self.inner.broadcast(x, root)

    def barrier(self) -> None:
        self.inner.barrier()

    def split(self, color: int, key: int = 0) -> Comm:
        return self.around(self.inner.split(color, key))

    @cached_property
    def native(self) -> Comm:
        return self.around(self.inner.native)

    def background(self) -> Comm:
        return self.around(self.inner.background())

    def counter(self, numbers: int = 1) -> Counter:
        return self.inner.counter(numbers)

    def share(self, sharing: Sharing, x: Tensor) -> SharedVector:
        return self.inner.share(sharing, x)


class OnDevice(Forwarding):
    """Puts the tensors of a message that comes in where the receiver computes; messages pass through host memory."""

    def __init__(self, comm: Comm, device: torch.device) -> None:
        super().__init__(comm)
        self._device = device

    def around(self, comm: Comm) -> Comm:
        return OnDevice(comm, self._device)

    def recv(self, source: int = ANY, tag: int = 0, timeout: float | None = None) -> tuple[int, Message]:
        sender, msg = self.inner.recv(source, tag, timeout)
        return sender, msg.to(self._device)


class Mailbox(Forwarding):
    """Can take in all messages that are on their way, so that they are saved with the rest and lost by nobody.

    Only what a strategy sends without a tag is looked after: collectives written out in messages end by themselves.
    """

    def __init__(self, comm: Comm) -> None:
        super().__init__(comm)
        self._sent = [0] * comm.size
        self._received = [0] * comm.size
        self._waiting: list[tuple[int, Message]] = []

    def around(self, comm: Comm) -> Comm:
        return Mailbox(comm)

    def send(self, to: int, msg: Message, tag: int = 0) -> None:
        self._sent[to] += tag == 0
        self.inner.send(to, msg, tag)

    def isend(self, to: int, msg: Message, tag: int = 0) -> Request:
        self._sent[to] += tag == 0
        return self.inner.isend(to, msg, tag)

    def recv(self, source: int = ANY, tag: int = 0, timeout: float | None = None) -> tuple[int, Message]:
        if self._waiting and tag == 0:
            for i, (sender, _) in enumerate(self._waiting):
                if source in (ANY, sender):
                    return self._waiting.pop(i)
        sender, msg = self.inner.recv(source, tag, timeout)
        self._received[sender] += tag == 0
        return sender, msg

    def take_in(self) -> None:
        """Receive whatever others have sent. All ranks call it together, and none sends meanwhile."""
        sent = torch.zeros(self.size * self.size, dtype=torch.int64)
        self.inner.all_gather(sent, torch.tensor(self._sent))
        for sender, row in enumerate(sent.view(self.size, self.size).tolist()):
            self.take_in_from(sender, row[self.rank])

    def sent_to(self, to: int) -> int:
        """How many messages have gone to a rank so far."""
        return self._sent[to]

    def take_in_from(self, sender: int, sent: int) -> None:
        """Receive what is on its way from a rank that has sent so many messages so far."""
        while self._received[sender] < sent:
            self._waiting.append(self.inner.recv(sender))
            self._received[sender] += 1

    def state(self) -> list[tuple[int, Message]]:
        """The messages that wait to be received."""
        return list(self._waiting)

    def load_state(self, saved: list[tuple[int, Message]]) -> None:
        self._waiting = list(saved)
