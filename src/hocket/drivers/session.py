"""One rank's life under a strategy, whoever drives it: Hocket's own loop, the user's, or nobody, as for a server."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hocket.compress import Compressor, Identity
from hocket.compress.averaging import CompressedMeans
from hocket.compress.channel import Compressed
from hocket.compress.memory import Memory
from hocket.core.comm import Comm, Rank
from hocket.core.forward import Mailbox, OnDevice
from hocket.core.means import Mean, weighted_mean
from hocket.core.message import Message, Seal, as_it_is
from hocket.core.replica import Gradient, Replica
from hocket.core.seeds import generators, restore_generators
from hocket.core.serving import Frame, Server, parts
from hocket.core.sharing import Sharing
from hocket.core.staleness import ByGap, LookedAhead, by_gap, looked_ahead
from hocket.core.state import Kept, moved, refill
from hocket.core.worker import Strategy, Worker
from hocket.drivers.checkpoint import Checkpoint, pack_state, unpack_state
from hocket.drivers.fitting import part_of
from hocket.layouts.mesh import Mesh
from hocket.layouts.portion import AllOfIt, Portion
from hocket.measure.meter import Metered, Totals
from hocket.measure.timebase import ahead_s
from hocket.measure.trace import Trace

FRAME = 7002
"""The tag of what sessions tell each other, apart from a strategy's messages."""


class Session:
    """Begins a strategy, feeds it gradients, counts, saves and restores its state, and ends it.

    The first `workers` ranks are workers, those behind them servers. A worker calls `begin`, `work` and `start`, then
    `step` for every gradient, and `end`; a server calls `begin` and `serve`.
    """

    def __init__(
        self,
        rank: Rank,
        strategy: Strategy,
        workers: int,
        seed: int,
        device: torch.device,
        trace: Trace | None = None,
        compressor: Compressor | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self.rank, self.strategy, self.workers, self._seed = rank, strategy, workers, seed
        self.is_server = rank.comm.rank >= workers
        self.trace = trace or Trace(0)
        self.totals = Totals()
        self.group: Comm = rank.comm.split(int(self.is_server)) if strategy.server_ranks() else rank.comm
        """The workers, or the servers, among themselves: what is said here is not counted."""
        self.everyone = mesh.everyone if mesh else self.group
        """All who train: where a model is split over ranks, `rank.comm` has only those with the same part of it."""
        self.ensemble = mesh.model if mesh else None
        """The ranks that this worker is, where its model is split."""
        self._all_ranks = mesh.world if mesh else rank.comm
        self._apart = strategy.server_ranks() > 0 or not strategy.lockstep
        """Whether the parts of a split model have states that cannot be put together: where nobody keeps in step, what
        one has heard another has not, and servers have a part each."""
        self._device = device
        self._mail = Mailbox(self._on_device(self.group))
        self.comm = self._metered(self._mail)
        self._post = Mailbox(self._on_device(rank.comm)) if strategy.server_ranks() else self._mail
        """Between workers and servers."""
        self.world = self._metered(self._post) if strategy.server_ranks() else self.comm
        self.meeting: Comm = self.comm if mesh is None else self.beside(mesh.everyone)
        """All who train, and what is said counts as the strategy's does."""
        self.compile_s = 0.0
        self._kept = Kept()
        compresses = compressor is not None and not isinstance(compressor, Identity)
        self._memory: Memory | None = None
        if compressor and compresses:
            self._memory = Memory(compressor, self._kept, seed, rank.comm.rank, self.trace.spans(rank.clock))

    def _on_device(self, comm: Comm) -> Comm:
        return comm if self._device.type == "cpu" else OnDevice(comm, self._device)

    def _metered(self, comm: Comm) -> Metered:
        return Metered(comm, self.rank.clock, self.rank.status, self.trace, self.totals)

    def beside(self, comm: Comm) -> Comm:
        """Another communicator of this rank's, whose traffic counts as the strategy's does."""
        return self.comm.around(self._on_device(comm))

    # The life of a worker

    def begin(self, replica: Replica, portion: Portion | None = None) -> None:
        """Everyone sets out from rank 0's weights. `portion` is what the replica is of the model, unless all of it."""
        self.replica = replica
        self.portion = portion or AllOfIt(replica)
        self.rank.status.step = self.rank.status.samples = 0
        with self.rank.clock.paused():
            if self._memory is not None:
                self._memory.scheme = self._memory.scheme.layered([p.numel() for p in replica.parameters])
                self._memory.warm_up()
            for tensor in [replica.values, *replica.rest()]:
                self.rank.comm.broadcast(tensor)  # a Task may hold a module with weights of its own
            replica.spread()
            self.rank.comm.barrier()
            ahead = ahead_s(self._all_ranks, self.rank.clock)
            self.comm.set_ahead(ahead)
            self.world.set_ahead(ahead)

    def work(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_step: Callable[[], object],
        batch: int | None = None,
        sharing: Sharing | None = None,
    ) -> Worker:
        """Make the worker; `start` follows. `batch` is a full one's samples, where that is known; `sharing` takes the
        place of the strategy's own."""
        self.optimizer = optimizer
        optimizer_step = self._seen("step", optimizer_step)
        comm, seal = self._compressed(self.comm)
        world, _ = self._compressed(self.world)
        mixing = 1.0 if self._memory is None else self._memory.scheme.mixing
        self.worker = worker = Worker(
            comm, self.rank.clock, self.replica, optimizer, self._seed,
            self.replica.stepping(optimizer, optimizer_step), world, self._kept, self._served, batch,
            self._mean(), seal, mixing,
        )  # fmt: skip
        sharing = sharing or self.strategy.sharing(self.replica.x.numel(), worker.size)
        if sharing is not None:
            began = time.perf_counter()
            self.rank.status.operation = "compile"
            worker.shared = self.group.share(sharing, self.replica.x)
            self.rank.status.operation = "compute"
            self.compile_s += time.perf_counter() - began
        return worker

    def _seen(self, what: str, step: Callable[[], object]) -> Callable[[], object]:
        """A function that a timeline shows."""
        if not self.trace.fine:
            return step
        spans = self.trace.spans(self.rank.clock)

        def seen() -> object:
            with spans(what):
                return step()

        return seen

    def _compressed(self, comm: Comm) -> tuple[Comm, Seal]:
        if self._memory is None:
            return comm, as_it_is
        compressed = Compressed(comm, self._memory, self.replica.x.dtype)
        return compressed, compressed.seal

    def _mean(self) -> Mean:
        if self._memory is None:
            return weighted_mean
        shapes = [p.shape for p in self.replica.parameters]
        return CompressedMeans(self._memory, self.replica.x, shapes, self.optimizer)

    def start(self) -> None:
        """Start the strategy, up to the first gradient that it asks for."""
        self._steps = self.strategy.worker(self.worker)
        next(self._steps)

    def step(self, g: Gradient) -> None:
        """Send the next gradient in."""
        worker, status = self.worker, self.rank.status
        worker.step += 1
        status.step = worker.step
        status.samples += int(g.samples)
        self._steps.send(g)
        self._parameters_changed()

    def _parameters_changed(self) -> None:
        if not self.strategy.lockstep:
            self.portion.make_alike(self.replica.values)  # each rank has heard others
        elif self._memory is not None:
            self.portion.make_alike(self.replica.x)  # each has lost something else
        self.replica.spread()

    def count(self, steps: int, samples: int) -> None:
        """Steps that were taken elsewhere, in compiled code."""
        self.worker.step += steps
        self.rank.status.step = self.worker.step
        self.rank.status.samples += samples

    def end(self) -> None:
        """The farewell: the strategy ends, and everyone has one model. What is said last is said exactly."""
        if self._memory is not None:
            self._memory.exactly = True
        try:
            self._steps.send(None)
        except StopIteration:
            self._parameters_changed()
            return
        raise AssertionError("a strategy must end when it is sent None")

    # The life of a server

    def serve(self, x: Tensor, g: Tensor, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> Server:
        """All of it. `x` is the part of the parameters that this server holds, `g` where their gradient is put."""
        rank, clock = self.rank, self.rank.clock
        self.optimizer = optimizer

        def log(event: str, **fields: Any) -> None:
            now = clock.now()
            self.trace.add(event, now, now, **fields)

        def show(worker: int) -> None:
            with clock.free():
                rank.comm.isend(worker, Message("look", (self._post.sent_to(worker),), (x,)), FRAME)

        def save() -> None:
            with clock.free():
                rank.comm.isend(0, Message("state", (), (pack_state(self._common_state()),)), FRAME)

        def load(packed: Tensor) -> None:
            self._load_common(unpack_state(packed))

        step = self.replica.stepping(optimizer, self._seen("step", step))

        def count() -> None:
            step()
            rank.status.step += 1

        frame = Frame(show, save, load)
        world, seal = self._compressed(self.world)
        server = Server(
            world, clock, self.workers, x, g, optimizer, count, log, frame, self._kept, seal, *_fastest(x, g)
        )
        self.strategy.server(server)
        return server

    def _served(self) -> Tensor:
        """The parameters as the servers hold them."""
        with self.rank.clock.free():
            return torch.cat([shown.tensors[0].to(self._device) for shown in self._ask_servers("look")])

    def _ask_servers(self, kind: str) -> list[Message]:
        self._tell_servers(kind)
        return [self.rank.comm.recv(r, FRAME)[1] for r in range(self.workers, self.rank.comm.size)]

    def part_of(self, vector: Tensor) -> Tensor:
        """What this server holds of a vector."""
        return parts(vector, self.group.size)[self.group.rank]

    def span(self) -> slice:
        """Where in the vector that is."""
        lengths = [len(part) for part in parts(self.replica.x, self.group.size)]
        begin = sum(lengths[: self.group.rank])
        return slice(begin, begin + lengths[self.group.rank])

    # Saving

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside, all workers are here and nothing is on its way: the moment at which a run can be saved."""
        self.worker.settle()
        answers = self._ask_servers("away")  # not for free: it must not overtake what was sent before
        with self.rank.clock.free():
            self.comm.barrier()  # inside the clock: who is early waits
            self._mail.take_in()
            for server, told in enumerate(answers, self.workers):
                self._post.take_in_from(server, told.ints[0])
            self.comm.settle()
            yield
            self.everyone.barrier()
            self.rank.clock.line_up()
            self._tell_servers("back")

    def _tell_servers(self, kind: str) -> None:
        for server in range(self.workers, self.rank.comm.size):
            self.rank.comm.isend(server, Message(kind))

    def gather(self, more: dict[str, Any]) -> list[Tensor]:
        """Every rank's packed state, on worker 0; called inside `pause`. `more` is what the driver adds of its own."""
        comm, me = self.rank.comm, self.rank.comm.rank
        state = self._worker_state()
        own = pack_state((state if self._apart else self.portion.whole(state)) | {"driver": more})
        if me:
            comm.isend(0, Message("state", (), (own,)), FRAME).wait()
            return []
        for server in range(self.workers, comm.size):
            comm.isend(server, Message("save"))
        states = [own, *(comm.recv(r, FRAME)[1].tensors[0].clone() for r in range(1, comm.size))]
        return [self._with_other_parts(packed) for packed in states] if self._apart else states

    def _with_other_parts(self, own: Tensor) -> Tensor:
        """The packed states of all parts of a split model, side by side, on the first of its ranks."""
        if self.ensemble is None:
            return own
        return pack_state({"parts": [unpack_state(packed) for packed in self.portion.gathered(own)]})

    def _own_part(self, state: dict[str, Any]) -> dict[str, Any]:
        """Of a state that was saved, what this rank, and those with the same part, go on from."""
        if self._apart and (self.ensemble is not None or "parts" in state):
            return part_of(state, self.ensemble, self.replica.fingerprint())
        return self.portion.own(state)

    def load(self, checkpoint: Checkpoint | None) -> dict[str, Any]:
        """Go on from what rank 0 has read; all workers call it together. Returns this worker's state."""
        comm = self.rank.comm
        with self.pause():
            if comm.rank == 0:
                assert checkpoint is not None
                state = self._own_part(checkpoint.states[0])
                for r, other in enumerate(checkpoint.states[1:], 1):
                    packed = Message("load", (), (pack_state(self._own_part(other)),))
                    comm.isend(r, packed, FRAME if r < self.workers else 0).wait()
                    if r >= self.workers:
                        comm.recv(r, FRAME)
            else:
                state = unpack_state(comm.recv(0, FRAME)[1].tensors[0])
            self._load_common(state)
            self._load_worker(state)
        return state

    def _common_state(self) -> dict[str, Any]:
        """What workers and servers have alike."""
        return {
            "part": self.replica.fingerprint(),
            "step": self.rank.status.step,
            "samples": self.rank.status.samples,
            "replica": self.replica.values,
            "rest": self.replica.rest(),
            "optimizer": self.optimizer.state_dict(),
            "kept": self._kept.values,
            "totals": self.totals,
            "clock": self.rank.clock.state(),
        }

    def _load_common(self, state: dict[str, Any]) -> None:
        self.rank.status.step, self.rank.status.samples = state["step"], state["samples"]
        refill(self.replica.values, state["replica"])
        refill(self.replica.rest(), state["rest"])
        self.replica.spread()
        self.optimizer.load_state_dict(state["optimizer"])
        self._kept.load(state["kept"], self._device)
        refill(self.totals, state["totals"])
        if self.is_server:
            self.rank.clock.restore(state["clock"])

    def _worker_state(self) -> dict[str, Any]:
        worker = self.worker
        random = generators() | {"own": worker.rng, "common": worker.common_rng}
        if self._device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self._device)
        return self._common_state() | {
            "random": random,
            "staleness": worker.staleness,
            "mail": self._mail.state(),
            "post": self._post.state(),
            "shared": worker.shared.state() if worker.has_shared else {},
        }

    def _load_worker(self, state: dict[str, Any]) -> None:
        worker, random = self.worker, state["random"]
        worker.step = state["step"]
        refill(worker.staleness, state["staleness"])
        if "own" in random:  # who joins later draws numbers of its own
            refill(worker.rng, random["own"])
        refill(worker.common_rng, random["common"])
        self._mail.load_state(moved(state["mail"], self._device))
        self._post.load_state(moved(state.get("post", []), self._device))
        if state["shared"]:
            worker.shared.load_state(state["shared"])

    def load_random(self, state: dict[str, Any]) -> None:
        """Set the generators that user code draws from, and the clock, to where they were: the last thing before
        training goes on."""
        random = state["random"]
        if "global" in random:
            restore_generators(random)
        if "cuda" in random and self._device.type == "cuda":
            torch.cuda.set_rng_state(random["cuda"], self._device)
        self.rank.clock.restore(state["clock"])


def _fastest(x: Tensor, g: Tensor) -> tuple[ByGap, LookedAhead]:
    """Compiled where that can be, and where Numba is loaded anyway: both give the same bits. What is tempered is then
    put where the optimizer looks for it."""
    if "numba" not in sys.modules or x.dtype != torch.float32 or x.device.type != "cpu":
        return by_gap, looked_ahead
    from hocket.kernels.memory import tempering

    tempering.by_gap(g[:0], x[:0], x[:0], 1.0, g[:0])  # before the clock starts
    tempering.looked_ahead(x[:0], x[:0], 1.0)
    return partial(tempering.by_gap, out=g), tempering.looked_ahead
