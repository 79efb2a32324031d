"""The engine `torch`: torch.distributed, Gloo on CPUs and NCCL on GPUs."""

from __future__ import annotations

import atexit
import dataclasses
import os
import socket
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hocket.core.comm import ANY, Comm, Deferred, Op, Request, receiving, sender
from hocket.core.environment import inside_torchrun, launched_size
from hocket.core.errors import CommError, DeadlineExceeded, NothingCame, UserError
from hocket.core.message import Message
from hocket.core.sharing import SharedVector, Sharing
from hocket.core.worker import Need
from hocket.engines.binding import Bind, check_binding, chosen_cores
from hocket.engines.carrier import Carrier
from hocket.engines.engine import DEADLINE_S, Engine, Listener, Main, Program, check_deadline, engine
from hocket.engines.first_meeting import never_met
from hocket.engines.host import give_back, on_host
from hocket.engines.line import Control
from hocket.engines.processes import run_joined
from hocket.engines.supervisor import LOOPBACK, Supervisor, rank_environment, start_limit

# The names of torch 2.13, where the older ones warn; torch 2.11 has only those.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


@engine("torch")
@dataclass(frozen=True)
class TorchDistributed(Engine):
    """Ranks are processes on torch.distributed: Gloo on CPUs, NCCL where each rank has its own GPU."""

    deadline: float = DEADLINE_S
    bind: Bind = "auto"
    offers: ClassVar[frozenset[Need]] = frozenset({"messages", "collectives", "any-source", "shared-memory"})

    def __post_init__(self) -> None:
        check_deadline(self.deadline)

    @classmethod
    def launched_by(cls) -> str:
        return "torchrun" if inside_torchrun() else ""

    @classmethod
    def room(cls, hosts: str) -> int:
        return (launched_size() if inside_torchrun() else None) or 0

    def check(self, size: int) -> None:
        if self.starts_processes():
            check_binding(self.bind, size)

    def starts_processes(self) -> bool:
        return not inside_torchrun()

    def run(self, main: Main, size: int, listener: Listener) -> list[Any]:
        if inside_torchrun():
            comm = connect(self.deadline)
            if comm.size != size:
                raise UserError(f"torchrun started {comm.size} ranks but {size} are asked for; leave --workers out")
            return run_joined(comm, main, listener, self.offers, abort)
        assert isinstance(main, Program), "a fresh process can only run a Program"
        control = Control()
        store, port = _store()
        cores = chosen_cores(self.bind, size)
        env = rank_environment(control, main, "torch", self.deadline, cores) | LOOPBACK
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        env |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        each = [{"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(size)]
        try:
            return Supervisor(size, control, self.deadline, listener).run_ranks(env, each)
        finally:
            del store  # it lived as long as the ranks needed it


def _store() -> tuple[Any, int]:
    """Where the ranks find each other, and its port. It would listen on every interface if it could choose."""
    server = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = server.getsockname()[1]
    fd = server.detach()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=fd)  # type: ignore[attr-defined]
    return store, port


def connect(deadline: float) -> Comm:
    if not dist.is_initialized():
        size = int(os.environ["WORLD_SIZE"])
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        # NCCL refuses two ranks on one GPU; Gloo carries the messages then.
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        backend = "cpu:gloo,cuda:nccl" if gpus >= local_ranks else "gloo"
        # Our own waits have the deadline; this limit is for the first meeting too, to which some may come late.
        limit_s = start_limit(size, deadline)
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=limit_s))
        except dist.DistStoreError:
            raise never_met(int(os.environ["RANK"]), size, limit_s) from None
        atexit.register(_destroy)
    comm = TorchComm(dist.group.WORLD, deadline)
    from hocket.engines.one_host import by_host  # Numba takes half a second to import

    return by_host(comm, deadline, comm.carries_on_gpus)


_carrying: deque[Tensor] = deque(maxlen=4)
"""Tensors that Gloo's threads may still hold: they let go a moment after we hear that an operation is done."""


def _destroy() -> None:
    """Let Gloo's threads come to rest: one that needs Python when there is none aborts the process."""
    until = time.monotonic() + 5.0
    while any(x._use_count() > 1 for x in _carrying) and time.monotonic() < until:  # type: ignore[attr-defined]
        time.sleep(0.001)
    dist.destroy_process_group()


def abort(status: int) -> None:
    os._exit(status)


AHEAD = 64
"""How many messages a rank may be ahead of the one that receives them, before `isend` waits for it."""


class TorchComm:
    """torch.distributed with its time-outs turned into errors that say who waited for what."""

    def __init__(self, group: Any, deadline: float, carrier: Carrier | None = None) -> None:
        self._group, self._deadline, self._carrier = group, deadline, carrier
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._nccl = "nccl" in str(dist.get_backend_config(group))
        self._sending: defaultdict[int, deque[tuple[Any, Tensor]]] = defaultdict(deque)

    def _wait(self, work: Any, operation: str, peers: str, timeout: float | None = None) -> None:
        limit = self._deadline if timeout is None else timeout
        try:
            work.wait(timedelta(seconds=limit))
        except RuntimeError as error:
            text = str(error)
            if "imed out" in text or "imeout" in text:
                if timeout is not None:
                    raise NothingCame(self.rank, timeout, operation) from error
                raise DeadlineExceeded(self.rank, operation, peers, limit) from error
            first = text.partition("\n")[0]
            raise CommError(f"rank {self.rank} in {operation} with {peers}: {first}") from error

    def _finish(self, work: Any, operation: str) -> None:
        self._wait(work, operation, "the other ranks")

    def _world(self, rank: int) -> int:
        return dist.get_global_rank(self._group, rank)

    # A message is two: its length, then its bytes, on neighbouring tags.

    def send(self, to: int, msg: Message, tag: int = 0) -> None:
        self.isend(to, msg, tag).wait()

    def isend(self, to: int, msg: Message, tag: int = 0) -> Request:
        block = torch.from_numpy(msg.pack())
        length = torch.tensor([block.numel()], dtype=torch.int64)
        works = [
            (dist.isend(part, self._world(to), self._group, 2 * tag + offset), part)
            for part, offset in ((length, 0), (block, 1))
        ]

        def finish(sent: Iterable[tuple[Any, Tensor]] = works) -> None:
            for work in (work for work, _ in sent if not work.is_completed()):  # to wait twice is to wait for ever
                self._wait(work, f"send(to={to})", f"rank {to}")

        # The parts must live until they have left, which Gloo only tells to who waits for it.
        sending = self._sending[to]
        sending.extend(works)
        while len(sending) > 2 * AHEAD or sending[0][0].is_completed():
            finish([sending.popleft()])
        return Deferred(finish)

    def recv(self, source: int = ANY, tag: int = 0, timeout: float | None = None) -> tuple[int, Message]:
        name, who = receiving(source, tag), sender(source)
        length = torch.zeros(1, dtype=torch.int64)
        work: Any = dist.irecv(length, None if source == ANY else self._world(source), self._group, 2 * tag)
        self._wait(work, name, who, timeout)
        world_source: int = work._source_rank() if source == ANY else self._world(source)
        block = torch.from_numpy(np.empty(int(length), np.uint8))
        self._wait(dist.irecv(block, world_source, self._group, 2 * tag + 1), name, who)
        return dist.get_group_rank(self._group, world_source), Message.unpack(block.numpy())

    def carries_on_gpus(self, x: Tensor) -> bool:
        """Whether a tensor stays on GPUs on its way: NCCL carries what is there, Gloo what is in main memory."""
        return self._nccl and x.is_cuda

    def _carried(self, x: Tensor) -> Tensor:
        """The tensor where this group can carry it."""
        carried = x.detach() if self.carries_on_gpus(x) else on_host(x)
        _carrying.append(carried)
        return carried

    def iall_reduce(self, x: Tensor, op: Op = "sum") -> Request:
        if self._carrier:
            return self._carrier.start(lambda: self.all_reduce(x, op))
        return self._posted(x, op)

    def _posted(self, x: Tensor, op: Op) -> Request:
        carried = self._carried(x)
        work = dist.all_reduce(carried, _OPS[op], self._group, async_op=True)

        def finish() -> None:
            self._finish(work, "all_reduce")
            self._mean(carried, op)
            give_back(x, carried)

        return Deferred(finish)

    def all_reduce(self, x: Tensor, op: Op = "sum") -> None:
        self._posted(x, op).wait()

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op = "sum") -> None:
        carried = self._carried(out)
        work = _reduce_scatter(carried, self._carried(x), _OPS[op], self._group, async_op=True)
        self._finish(work, "reduce_scatter")
        self._mean(carried, op)
        give_back(out, carried)

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        carried = self._carried(out)
        self._finish(_all_gather(carried, self._carried(x), self._group, async_op=True), "all_gather")
        give_back(out, carried)

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        carried = self._carried(x)
        self._finish(dist.broadcast(carried, self._world(root), self._group, async_op=True), "broadcast")
        give_back(x, carried)

    def _mean(self, x: Tensor, op: Op) -> None:
        if op == "mean":
            x /= self.size

    def barrier(self) -> None:
        self._finish(dist.barrier(self._group, async_op=True), "barrier")

    def split(self, color: int, key: int = 0) -> Comm:
        mine = torch.tensor([color, key, self.rank])
        everyone = torch.zeros(3 * self.size, dtype=torch.int64)
        self.all_gather(everyone, mine)
        chosen = [(k, r) for c, k, r in everyone.view(-1, 3).tolist() if c == color]
        members = [self._world(r) for _, r in sorted(chosen)]
        # A group is named after its members: a mere count, as without local synchronization, would be the same for
        # groups that two communicators split off at one time, whose ranks would then connect to each other's.
        limit = timedelta(seconds=self._deadline)
        group = dist.new_group(members, timeout=limit, use_local_synchronization=True)
        return TorchComm(group, self._deadline)

    @property
    def native(self) -> TorchComm:
        return self

    def background(self) -> TorchComm:
        """Gloo goes on by itself; the thread knows when it is done, and gives the result back where it has to."""
        members = [self._world(rank) for rank in range(self.size)]
        group = dist.new_group(members, timeout=timedelta(seconds=self._deadline), use_local_synchronization=True)
        return TorchComm(group, self._deadline, Carrier())

    def share(self, sharing: Sharing, x: Tensor) -> SharedVector:
        from hocket.engines.mapped import between_processes

        return between_processes(self, dataclasses.replace(sharing, deadline_s=self._deadline), x)

    def counter(self, numbers: int = 1) -> StoreCounter:
        store = dist.distributed_c10d._get_default_store()
        number = torch.zeros(1, dtype=torch.int64)
        if self.rank == 0:
            number += store.add("hocket/counters", 1)  # a key that no counter had, even if we have connected before
        self.broadcast(number)
        return StoreCounter(store, f"hocket/counter/{int(number)}", numbers, self)


@dataclass(frozen=True)
class StoreCounter:
    """Numbers in the store through which the ranks found each other."""

    store: Any
    key: str
    numbers: int
    comm: TorchComm

    def take(self, count: int = 1, number: int = 0) -> int:
        return int(self.store.add(f"{self.key}/{number}", count)) - count

    def close(self) -> None:
        self.comm.barrier()
        if self.comm.rank == 0:
            for number in range(self.numbers):
                self.store.delete_key(f"{self.key}/{number}")
