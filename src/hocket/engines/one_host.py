"""Ranks that share a host meet in its memory, whatever library they would speak through."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hocket.core.comm import ANY, Comm, Counter, Op, Request
from hocket.core.forward import Forwarding
from hocket.core.message import Message
from hocket.engines import commons, post
from hocket.engines.carrier import Carrier
from hocket.engines.commons import Commons, Patience
from hocket.engines.host import give_back, on_host
from hocket.engines.mapped import map_together
from hocket.kernels.memory import futex, tally
from hocket.kernels.memory.block import Block, place, room

_SUMMED = frozenset({
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
})  # fmt: skip
"""Types that have sums; the rest is left to the library."""

_CORES = 1024
"""Numbers of cores that are told apart."""

Takes = Callable[[Tensor], bool]


def this_host() -> int:
    """A number that ranks have in common if they can map each other's memory."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    memory = os.stat(place()).st_dev
    text = f"{boot.read_text() if boot.exists() else ''}/{socket.gethostname()}/{memory}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def by_host(
    comm: Comm,
    deadline_s: float,
    library_takes: Takes,
    help_along: Callable[[], bool] | None = None,
    host: int | None = None,
) -> Comm:
    """The communicator as it is best used: through memory among ranks of one host, by its library between hosts.

    `library_takes` says which tensors are the library's wherever the ranks are, such as those on GPUs. `help_along`
    is told of in `Patience`. `host` is the number of this rank's host, unless that is to be found out.
    """
    if comm.size == 1 or not futex.available:
        return comm
    commons.load_kernels()
    post.load_kernels()
    tally.load_kernels()
    hosts = torch.zeros(comm.size, dtype=torch.int64)
    comm.all_gather(hosts, torch.tensor([this_host() if host is None else host]))
    here = hosts == hosts[comm.rank]
    patience = Patience(deadline_s, int(here.sum()) > _cores(comm, here), help_along)
    return _arranged(comm, hosts.tolist(), patience, library_takes)


def _cores(comm: Comm, here: Tensor) -> int:
    """How many cores the ranks that are `here` have together: each may be tied to one of its own."""
    mine, everyone = (torch.zeros(ranks * _CORES, dtype=torch.uint8) for ranks in (1, comm.size))
    mine[[core for core in os.sched_getaffinity(0) if core < _CORES]] = 1
    comm.all_gather(everyone, mine)
    return int(everyone.view(comm.size, _CORES)[here].amax(0).sum())


def _arranged(comm: Comm, hosts: list[int], patience: Patience, library_takes: Takes) -> Comm:
    if len(set(hosts)) == comm.size:
        return comm
    if len(set(hosts)) == 1:
        return OneHost(comm, patience, library_takes)
    return Hosts(comm, hosts, patience, library_takes)


def _aside(patience: Patience) -> Patience:
    """Of a thread that wants the core which its own rank computes on, and must not touch what that has under way."""
    return dataclasses.replace(patience, crowded=True, help_along=None)


def _post(comm: Comm, patience: Patience) -> post.Post | None:
    """None where ranks are too many for it, or cannot wake each other: they then speak through the library."""
    pipes = post.pipes_of_all(comm) if comm.size <= post.MOST_RANKS else None
    if pipes is None:
        return None
    block = map_together(comm, post.nbytes(comm.size, room()), lambda block: post.lay_out(block, comm.size, patience))
    return post.Post(block, pipes, comm.size, comm.rank, patience)


def _both(letters: post.Post, patience: Patience) -> Callable[[], bool]:
    """A rank that waits in a collective may have sent what others wait for, through memory or through the library."""
    library = patience.help_along
    return letters.move if library is None else lambda: letters.move() | library()


class OneHost(Forwarding):
    """Collectives and messages through memory. What does not block is left to the library, which goes on by itself."""

    def __init__(self, comm: Comm, patience: Patience, library_takes: Takes, carrier: Carrier | None = None) -> None:
        super().__init__(comm)
        self._patience, self._library_takes, self._carrier = patience, library_takes, carrier
        self._post = _post(comm, patience) if carrier is None else None
        helpful = dataclasses.replace(patience, help_along=_both(self._post, patience)) if self._post else patience

        def made(block: Block) -> Commons:
            return Commons(block, comm.size, comm.rank, helpful)

        self._commons = made(map_together(comm, commons.nbytes(comm.size, room()), lambda block: made(block).lay_out()))

    def send(self, to: int, msg: Message, tag: int = 0) -> None:
        self.isend(to, msg, tag).wait()

    def isend(self, to: int, msg: Message, tag: int = 0) -> Request:
        return (self._post or self.inner).isend(to, msg, tag)

    def recv(self, source: int = ANY, tag: int = 0, timeout: float | None = None) -> tuple[int, Message]:
        return (self._post or self.inner).recv(source, tag, timeout)

    def counter(self, numbers: int = 1) -> Counter:
        return tally.Tally(map_together(self, tally.nbytes(numbers), lambda block: None))

    @property
    def native(self) -> Comm:
        return self.inner

    def around(self, comm: Comm) -> Comm:
        return comm if comm.size == 1 else OneHost(comm, self._patience, self._library_takes)

    def background(self) -> Comm:
        return OneHost(self.inner.background(), _aside(self._patience), self._library_takes, Carrier())

    def iall_reduce(self, x: Tensor, op: Op = "sum") -> Request:
        if self._carrier:
            return self._carrier.start(lambda: self.all_reduce(x, op))
        return self.inner.iall_reduce(x, op)

    def all_reduce(self, x: Tensor, op: Op = "sum") -> None:
        if x.dtype not in _SUMMED or self._library_takes(x):
            self.inner.all_reduce(x, op)
            return
        host = on_host(x)
        self._commons.all_reduce(host, op)
        give_back(x, host)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op = "sum") -> None:
        if x.dtype not in _SUMMED or self._library_takes(x):
            self.inner.reduce_scatter(out, x, op)
            return
        host = on_host(out)
        self._commons.reduce_scatter(host, on_host(x), op)
        give_back(out, host)

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        if self._library_takes(x):
            self.inner.all_gather(out, x)
            return
        host = on_host(out)
        self._commons.all_gather(host, on_host(x))
        give_back(out, host)

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        if self._library_takes(x):
            self.inner.broadcast(x, root)
            return
        host = on_host(x)
        self._commons.broadcast(host, root)
        give_back(x, host)

    def barrier(self) -> None:
        self._commons.barrier()


class Hosts(Forwarding):
    """Collectives inside each host first, then between one rank of each by the library, then inside again.

    `all_gather` and `reduce_scatter` are the library's.
    """

    def __init__(
        self,
        comm: Comm,
        hosts: list[int],
        patience: Patience,
        library_takes: Takes,
        carrier: Carrier | None = None,
    ) -> None:
        super().__init__(comm)
        self._hosts, self._patience, self._library_takes, self._carrier = hosts, patience, library_takes, carrier
        self._numbers = list(dict.fromkeys(hosts))
        here = hosts[self.rank]
        local = comm.split(self._numbers.index(here))
        self._local = _arranged(local, [here] * local.size, patience, library_takes)
        between = comm.split(int(local.rank > 0))
        self._between = between if local.rank == 0 else None

    @property
    def native(self) -> Comm:
        return self.inner

    def around(self, comm: Comm) -> Comm:
        hosts = torch.zeros(comm.size, dtype=torch.int64)
        comm.all_gather(hosts, torch.tensor([self._hosts[self.rank]]))
        return _arranged(comm, hosts.tolist(), self._patience, self._library_takes)

    def background(self) -> Comm:
        library = self.inner.background()
        if library is self.inner:
            return self  # which wants to be called from one thread alone
        return Hosts(library, self._hosts, _aside(self._patience), self._library_takes, Carrier())

    def iall_reduce(self, x: Tensor, op: Op = "sum") -> Request:
        if self._carrier:
            return self._carrier.start(lambda: self.all_reduce(x, op))
        return self.inner.iall_reduce(x, op)

    def all_reduce(self, x: Tensor, op: Op = "sum") -> None:
        if self._library_takes(x):
            self.inner.all_reduce(x, op)
            return
        part: Op = "sum" if op == "mean" else op
        self._local.all_reduce(x, part)
        if self._between:
            self._between.all_reduce(x, part)
        self._local.broadcast(x)
        if op == "mean":
            x /= self.size

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        if self._library_takes(x):
            self.inner.broadcast(x, root)
            return
        host = self._hosts[root]
        if host == self._hosts[self.rank]:
            self._local.broadcast(x, self._hosts[:root].count(host))
        if self._between:
            self._between.broadcast(x, self._numbers.index(host))
        if host != self._hosts[self.rank]:
            self._local.broadcast(x)

    def barrier(self) -> None:
        self._local.barrier()
        if self._between:
            self._between.barrier()
        self._local.barrier()
