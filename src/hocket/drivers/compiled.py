"""Shared-memory strategies in threads, with the whole worker compiled: no Python, and no GIL, inside an epoch."""

from __future__ import annotations

import threading
import time
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hocket import optim
from hocket.core.errors import CommError, UserError
from hocket.drivers.course import Course
from hocket.drivers.plan import Plan
from hocket.drivers.schedule import Schedule
from hocket.kernels.memory.vector import MappedVector
from hocket.kernels.memory.words import NEXT
from hocket.kernels.models.family import BROKEN_LOCK, Kernel
from hocket.measure.losses import Losses
from hocket.tasks import SampleSet, Task
from hocket.tasks.base import compiled

_making = threading.Lock()
_kernels: WeakKeyDictionary[SampleSet, Kernel | None] = WeakKeyDictionary()


def kernel_for(plan: Plan, task: Task, train: SampleSet) -> Kernel | None:
    """The compiled worker that fits a run, if there is one. All threads share it, and so its data."""
    if "shared-memory" not in plan.made_strategy.needs or plan.device != "cpu":
        return None
    with _making:
        if train not in _kernels:
            _kernels[train] = compiled(task.build_model(plan.seed), task.loss, train)
        kernel = _kernels[train]
    if kernel is None or plan.optimizer != "sgd" or plan.warmup:
        return None
    if plan.momentum and not kernel.takes_momentum:
        raise UserError(
            f"the compiled workers of task {plan.task.partition(':')[0]} change only what a sample touches, and hold "
            "no momentum, which would change everything; use --momentum 0, or --engine mpi"
        )
    return kernel


class CompiledWorkers:
    """A source of steps: a worker takes batches of an epoch by itself, gradients and updates in one, then all meet.

    The strategy's own worker begins and ends as everywhere; what it would do for each gradient is what is compiled.
    """

    def __init__(self, course: Course, task: Task, train: SampleSet) -> None:
        self._course, self._session, plan = course, course.session, course.plan
        kernel = kernel_for(plan, task, train)
        assert kernel is not None and kernel.dim == course.gradients.replica.x.numel(), "the kernel is another model's"
        self._kernel = kernel
        self._thread = kernel.worker(self._session.group.rank, plan.batch, plan.momentum)
        self._at = (0, 0)
        """The epoch, and how many of its batches were handed out."""
        course.steps_done = self._steps_done

    def run(self, optimizer: torch.optim.Optimizer, schedule: Schedule) -> dict[str, Any]:
        course, session, status = self._course, self._session, self._course.status
        status.operation = "compile"
        began = time.perf_counter()
        self._kernel.compile()  # by all, who wait for each other inside, and not at a barrier with a deadline
        session.compile_s = time.perf_counter() - began
        status.operation = "compute"
        with self._kernel.running():
            session.begin(course.gradients.replica)
            session.work(optimizer, optim.step_of(optimizer), course.plan.batch)
            shared = session.worker.shared
            assert isinstance(shared, MappedVector), "compiled workers run in real memory"
            self._shared = shared
            for name, vector in self._thread.kept().items():
                session.worker.keep(name, vector)
            course.rank.brake.on_stop = self._shared.stop
            course.rank.brake.passed(1)
            saved = course.begin(schedule)
            if saved:
                self._at = tuple(saved["at"])
            self._train()
            session.end()
            return course.end({"consensus_distance": None})

    def _train(self) -> None:
        course, plan, steps = self._course, self._course.plan, self._course.shards.steps
        last = -(-plan.steps // steps)
        while self._at[0] < last:
            epoch, batches = self._at
            wanted = min(plan.steps - epoch * steps, steps) * plan.batch * plan.workers
            handed_out = self._run_epoch(epoch, batches, wanted)
            stopped, due = self._agreed(course.rank.brake.purpose == "stop", course.time_to_save())
            in_the_middle = stopped and handed_out * plan.batch < wanted
            self._at = (epoch, handed_out) if in_the_middle else (epoch + 1, 0)
            is_last = self._at[0] == last
            if not is_last and not stopped:
                self._read_shared()
                if course.pulse(final=False):
                    return
            due |= course.saves_at_the_end() if is_last else course.saves_after(epoch + 1)
            if (stopped or due) and course.save(lambda: {"at": list(self._at)}):
                return

    def _agreed(self, *wishes: bool) -> list[bool]:
        """What one worker wants, all do."""
        found = torch.tensor(wishes, dtype=torch.int64)
        self._session.group.all_reduce(found, "max")
        return [bool(wish) for wish in found]

    def _steps_done(self) -> int:
        (epoch, batches), plan = self._at, self._course.plan
        return min(epoch * self._course.shards.steps + batches // plan.workers, plan.steps)

    def _run_epoch(self, epoch: int, first: int, samples: int) -> int:
        """Take batches of this epoch, of its first `samples` at most, until none is left; returns where that was."""
        course, shared, session = self._course, self._shared, self._session
        course.status.stop()
        with course.clock.paused():
            order = course.shards.order(epoch).numpy()[:samples]
            if session.worker.rank == 0:
                shared.control[NEXT] = first
            session.group.barrier()
        began_s, began_ns = course.clock.now(), time.monotonic_ns()
        end = self._thread.run_epoch(shared, order, course.schedule.at(epoch * course.shards.steps + 1))
        if end == BROKEN_LOCK:
            name = session.strategy.name
            raise CommError(f"worker {session.worker.rank} could not get the {name} before the deadline")
        log = self._thread.log
        session.trace.add("epoch", began_s, course.clock.now(), batches=len(log.loss))
        seconds = began_s - course.began_s + torch.from_numpy(log.clock_ns - began_ns) / 1e9
        losses, counts = torch.from_numpy(log.loss).double(), torch.from_numpy(log.samples).double()
        steps = torch.arange(len(losses)) + session.worker.step + 1
        course.ledger.add_all(Losses(losses, counts, seconds, steps))
        session.count(len(log.loss), int(log.samples.sum()))
        session.group.barrier()  # nobody hands out any more
        return int(shared.control[NEXT])

    def _read_shared(self) -> None:
        """The shared vector as all workers have left it."""
        x = self._course.gradients.replica.x
        if self._session.worker.rank == 0:
            self._shared.snapshot(x)
        self._session.group.broadcast(x)
