"""The engine `mpi`: mpi4py over the MPICH that pip installs, or over a cluster's own MPI."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from hocket.core.comm import ANY, Comm, Deferred, Op, Request, receiving, sender
from hocket.core.environment import inside_mpi, inside_torchrun, launched_rank, launched_size
from hocket.core.errors import CommError, DeadlineExceeded, NothingCame, UserError
from hocket.core.message import Message
from hocket.core.sharing import SharedVector, Sharing
from hocket.core.worker import Need
from hocket.engines.binding import Bind, check_binding, chosen_cores
from hocket.engines.carrier import Carrier
from hocket.engines.engine import DEADLINE_S, Engine, Listener, Main, Program, check_deadline, engine
from hocket.engines.first_meeting import limited
from hocket.engines.guard import remove_own_segments, wake_in_time
from hocket.engines.host import give_back, on_host
from hocket.engines.line import Control
from hocket.engines.mpi_launcher import BESIDE, check_shared_memory, find, is_exposed, is_mpich, is_open_mpi, slots
from hocket.engines.processes import run_joined
from hocket.engines.supervisor import LOOPBACK, STARTED, Supervisor, rank_environment, start_limit


@engine("mpi")
@dataclass(frozen=True)
class Mpi(Engine):
    """Ranks are processes that speak MPI: the fastest on one machine, and the way to a cluster."""

    hosts: str = ""
    """Machines and their slots, `a:4,b:4`; empty is this one."""
    mpiexec: str = ""
    """The launcher; empty is $HOCKET_MPIEXEC, the one beside this Python, or the first on the PATH."""
    deadline: float = DEADLINE_S
    bind: Bind = "auto"
    offers: ClassVar[frozenset[Need]] = frozenset({"messages", "collectives", "any-source", "polling", "shared-memory"})
    spans_hosts: ClassVar[bool] = True
    preference: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_deadline(self.deadline)
        slots(self.hosts)

    @classmethod
    def unavailable(cls) -> str:
        return available() or ""

    @classmethod
    def launched_by(cls) -> str:
        return "mpiexec" if inside_mpi() and not inside_torchrun() else ""

    @classmethod
    def room(cls, hosts: str) -> int:
        return (launched_size() if inside_mpi() else None) or slots(hosts)

    def check(self, size: int) -> None:
        if self.starts_processes():
            check_binding(self.bind, 0 if self.hosts else size)
            if is_mpich(self.launcher()) and not self.hosts:
                check_shared_memory(size)

    def note(self) -> str:
        if not self.starts_processes() or self.hosts or not is_exposed(self.launcher()):
            return ""
        return f"while ranks run, {self.launcher()} listens on all interfaces: Open MPI 5 cannot do without"

    def starts_processes(self) -> bool:
        return not inside_mpi()

    def run(self, main: Main, size: int, listener: Listener) -> list[Any]:
        if inside_mpi():
            comm = connect(self.deadline)
            if comm.size != size:
                raise UserError(f"mpiexec started {comm.size} ranks but {size} are asked for; leave --workers out")
            return run_joined(comm, main, listener, self.offers, abort)
        assert isinstance(main, Program), "a fresh process can only run a Program"
        launcher = self.launcher()
        everywhere = ("0.0.0.0", socket.gethostname()) if self.hosts else ("127.0.0.1", "127.0.0.1")
        control = Control(*everywhere)
        cores = [] if self.hosts else chosen_cores(self.bind, size)
        env = rank_environment(control, main, "mpi", self.deadline, cores) | ({} if self.hosts else LOOPBACK)
        supervisor = Supervisor(size, control, self.deadline, listener)
        if self._needs_no_launcher(launcher):
            return supervisor.run_ranks(env, [{} for _ in range(size)], pmi=True)
        command = [launcher, "-n", str(size)]
        if is_open_mpi(launcher):
            command += ["--oversubscribe", "--bind-to", "none"]
            command += ["--allow-run-as-root"] if os.getuid() == 0 else []
            command += ["--host", self.hosts] if self.hosts else []
            command += [word for name in env for word in ("-x", name)]
        else:
            command += ["-hosts", self.hosts] if self.hosts else []
        return supervisor.run_launcher(env, command + STARTED)

    def launcher(self) -> str:
        return find(self.mpiexec)

    def _needs_no_launcher(self, launcher: str) -> bool:
        """On one machine, with the MPICH beside this Python, we start the ranks ourselves (see `pmi`)."""
        chosen = self.hosts or self.mpiexec or os.environ.get("HOCKET_MPIEXEC")
        return not chosen and launcher == str(BESIDE) and is_mpich(launcher)


def available() -> str | None:
    """Why this engine cannot start here, or None if it can."""
    try:
        import mpi4py as mpi4py
    except ImportError:
        return "mpi4py is not installed"
    try:
        Mpi().launcher()
    except UserError as error:
        return str(error)
    return None


def _mpi() -> Any:
    """mpi4py.MPI, bound to the library of the launcher that started this process."""
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        # The MPICH wheel beside this Python would be found first and could not speak to Open MPI's launcher.
        os.environ.setdefault("MPI4PY_LIBMPI", "libmpi.so.40")
    else:
        # MPICH's UCX wants 4.3 MB of /dev/shm a rank by this way, which it does not need, and crashes where what is
        # free falls below 16 MiB after it has begun
        os.environ.setdefault("UCX_TLS", "^posix")
    from mpi4py import MPI

    return MPI


def connect(deadline: float) -> Comm:
    from hocket.engines.one_host import by_host  # Numba takes half a second to import

    wake_in_time()
    if size := launched_size():  # where Hocket started the ranks it looks at the clock itself
        with limited(launched_rank(), size, start_limit(size, deadline)):
            _mpi()
    comm = MpiComm(_mpi().COMM_WORLD, deadline, [])
    if size:  # no guard sees to what is left should they be killed
        comm.barrier()  # all have mapped what MPICH shares among the ranks of a host; it needs its name no more
        remove_own_segments()
    return by_host(comm, deadline, lambda x: False, comm.help_along)


def abort(status: int) -> None:
    """End all ranks. MPICH would leave its files in /dev/shm behind."""
    remove_own_segments()
    _mpi().COMM_WORLD.Abort(status)


YIELD_S, IDLE_YIELD_S, SLEEP_S = 0.002, 0.0001, 0.00005


class MpiComm:
    """Every operation is the non-blocking one, polled: so that each wait has a deadline,
    and ranks that outnumber the cores give way to each other."""

    def __init__(
        self, comm: Any, deadline: float, sending: list[tuple[Any, np.ndarray]], carrier: Carrier | None = None
    ) -> None:
        self._comm, self._deadline, self._carrier = comm, deadline, carrier
        self._MPI = _mpi()
        self.rank, self.size = comm.rank, comm.size
        self._ops = {"sum": self._MPI.SUM, "mean": self._MPI.SUM, "max": self._MPI.MAX, "min": self._MPI.MIN}
        self._sending = sending
        """What has not left yet, of all communicators of this rank: the blocks must live until then."""

    def _poll(
        self, test: Callable[[], Any], operation: str, peers: str, timeout: float | None = None, idle: bool = False
    ) -> Any:
        """Call `test` until it answers. Spin first (most waits are short), then yield, then sleep.

        Who is `idle`, as a server between two requests, leaves the core to others almost at once.
        """
        try:
            return self._polled(test, operation, peers, timeout, idle)
        except self._MPI.Exception as error:
            raise self._broken(error, operation, peers) from error

    def _broken(self, error: Exception, operation: str, peers: str) -> CommError:
        first = str(error).partition("\n")[0]
        return CommError(f"rank {self.rank} in {operation} with {peers}: {first}")

    def _polled(self, test: Callable[[], Any], operation: str, peers: str, timeout: float | None, idle: bool) -> Any:
        if timeout == 0:
            return test() or None
        for _ in range(100):
            if answer := test():
                return answer
        began = time.monotonic()
        limit = self._deadline if timeout is None else timeout
        while True:
            if answer := test():
                return answer
            waited = time.monotonic() - began
            if waited < (IDLE_YIELD_S if idle or self._carrier else YIELD_S):
                os.sched_yield()
            else:
                time.sleep(min(0.001, max(waited / 50, SLEEP_S)))
            if waited > limit:
                if timeout is not None:
                    return None
                raise DeadlineExceeded(self.rank, operation, peers, limit)

    def _finish(self, request: Any, operation: str) -> None:
        self._poll(request.Test, operation, "the other ranks")

    def send(self, to: int, msg: Message, tag: int = 0) -> None:
        self.isend(to, msg, tag).wait()

    def isend(self, to: int, msg: Message, tag: int = 0) -> Request:
        block = msg.pack()
        try:
            request = self._comm.Isend(block, to, tag)
        except self._MPI.Exception as error:
            raise self._broken(error, f"send(to={to})", f"rank {to}") from error
        self._forget_what_has_left()
        self._sending.append((request, block))
        return Deferred(lambda: self._poll(request.Test, f"send(to={to})", f"rank {to}"))

    def _forget_what_has_left(self) -> None:
        self._sending[:] = [(r, b) for r, b in self._sending if not r.Test()]

    def help_along(self) -> bool:
        """Let messages travel, which they do only inside a call of MPI. True while something of ours has not left."""
        self._forget_what_has_left()
        if not self._sending:
            self._comm.Iprobe(self._MPI.ANY_SOURCE, self._MPI.ANY_TAG)
        return bool(self._sending)

    def recv(self, source: int = ANY, tag: int = 0, timeout: float | None = None) -> tuple[int, Message]:
        status = self._MPI.Status()
        origin = self._MPI.ANY_SOURCE if source == ANY else source
        name, idle = receiving(source, tag), source == ANY
        handle = self._poll(lambda: self._comm.Improbe(origin, tag, status), name, sender(source), timeout, idle)
        if handle is None:
            raise NothingCame(self.rank, timeout, name)
        block = np.empty(status.Get_count(self._MPI.BYTE), np.uint8)
        self._finish(handle.Irecv(block), name)
        return status.source, Message.unpack(block)

    def iall_reduce(self, x: Tensor, op: Op = "sum") -> Request:
        if self._carrier:
            return self._carrier.start(lambda: self.all_reduce(x, op))
        return self._posted(x, op)

    def _posted(self, x: Tensor, op: Op) -> Request:
        host = on_host(x)
        request = self._comm.Iallreduce(self._MPI.IN_PLACE, host.numpy(), self._ops[op])

        def finish() -> None:
            self._finish(request, "all_reduce")
            _mean(host, op, self.size)
            give_back(x, host)

        return Deferred(finish)

    def all_reduce(self, x: Tensor, op: Op = "sum") -> None:
        self._posted(x, op).wait()

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op = "sum") -> None:
        host, given = on_host(out), on_host(x)
        request = self._comm.Ireduce_scatter_block(given.numpy(), host.numpy(), self._ops[op])
        self._finish(request, "reduce_scatter")
        _mean(host, op, self.size)
        give_back(out, host)

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        host, given = on_host(out), on_host(x)
        self._finish(self._comm.Iallgather(given.numpy(), host.numpy()), "all_gather")
        give_back(out, host)

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        host = on_host(x)
        self._finish(self._comm.Ibcast(host.numpy(), root), "broadcast")
        give_back(x, host)

    def barrier(self) -> None:
        self._finish(self._comm.Ibarrier(), "barrier")

    def split(self, color: int, key: int = 0) -> Comm:
        self.barrier()  # MPI's split has no deadline; after this everyone is known to be here
        return MpiComm(self._comm.Split(color, key), self._deadline, self._sending, self._carrier)

    @property
    def native(self) -> MpiComm:
        return self

    def background(self) -> MpiComm:
        """MPI moves nothing on outside its calls, so that a thread has to make them; one that leaves the core to what
        is computed. Not where the library wants to be called from one thread alone."""
        if self._MPI.Query_thread() < self._MPI.THREAD_MULTIPLE:
            return self
        self.barrier()
        return MpiComm(self._comm.Dup(), self._deadline, [], Carrier())

    def share(self, sharing: Sharing, x: Tensor) -> SharedVector:
        from hocket.engines.mapped import between_processes

        return between_processes(self, dataclasses.replace(sharing, deadline_s=self._deadline), x)

    def counter(self, numbers: int = 1) -> MpiCounter:
        self.barrier()
        return MpiCounter(self._MPI, self._comm, numbers, self.barrier)


class MpiCounter:
    """Numbers in rank 0's memory that others fetch and increment, one-sided."""

    def __init__(self, MPI: Any, comm: Any, numbers: int, barrier: Callable[[], None]) -> None:
        self._MPI, self._barrier = MPI, barrier
        self._window = MPI.Win.Allocate(8 * numbers if comm.rank == 0 else 0, 8, comm=comm)
        self._count, self._number = np.ones(1, np.int64), np.empty(1, np.int64)
        if comm.rank == 0:
            np.frombuffer(self._window, np.int64)[:] = 0
        barrier()
        self._window.Lock_all()

    def take(self, count: int = 1, number: int = 0) -> int:
        self._count[0] = count
        self._window.Fetch_and_op(self._count, self._number, 0, number, self._MPI.SUM)
        self._window.Flush(0)
        return int(self._number[0])

    def close(self) -> None:
        self._window.Unlock_all()
        self._barrier()  # MPI's own wait has no deadline; after this everyone is known to be here
        self._window.Free()


def _mean(x: Tensor, op: Op, size: int) -> None:
    if op == "mean":
        x /= size
