"""Workers in threads that are compiled as a whole: no Python, and no GIL, inside an epoch."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from hocket import optim
from hocket.core.errors import CommError, UserError
from hocket.core.memory_use import give_back_freed_memory
from hocket.core.threaded import Threaded
from hocket.drivers.course import Course
from hocket.drivers.plan import Plan
from hocket.drivers.schedule import Schedule
from hocket.kernels.memory.vector import MappedVector
from hocket.kernels.memory.words import NEXT
from hocket.kernels.models.family import BROKEN_LOCK, Kernel, Log
from hocket.measure.losses import Losses
from hocket.tasks import SampleSet, Task
from hocket.tasks.base import compiled

_making = threading.Lock()
_kernels: WeakKeyDictionary[SampleSet, Kernel | None] = WeakKeyDictionary()


def kernel_for(plan: Plan, task: Task, train: SampleSet) -> Kernel | None:
    """The compiled worker that fits a run, if there is one. All threads share it, and so its data."""
    if plan.made_strategy.compiled_sharing(1, plan.workers) is None or plan.device != "cpu":
        return None
    with _making:
        if train not in _kernels:
            _kernels[train] = compiled(task.build_model(plan.seed), task.loss, train)
        kernel = _kernels[train]
    if kernel is None or not plan.is_plain or task.on_step or task.on_epoch:
        return None
    if plan.momentum and not kernel.touches_all:
        raise UserError(
            f"the compiled workers of task {plan.task.partition(':')[0]} change only what a sample touches, and hold "
            "no momentum, which would change everything; use --momentum 0, or --driver pytorch"
        )
    if isinstance(plan.made_strategy, Threaded) and plan.made_strategy.hot and not kernel.hot(plan.made_strategy.hot):
        raise UserError("this task's model has no rows that are changed more often than others; leave hot out")
    return kernel


BY_ROWS = "workers tell each other what each row adds; hogwild:exchange=weights is the method as published"


class Compiled:
    """A source of steps whose gradients and updates are compiled as a whole."""

    def __init__(self, course: Course, task: Task, train: SampleSet) -> None:
        self._course, self._session = course, course.session
        kernel = kernel_for(course.plan, task, train)
        assert kernel is not None and kernel.dim == course.gradients.replica.x.numel(), "the kernel is another model's"
        self._kernel = kernel

    def _compile(self) -> None:
        """Called by all, who wait for each other inside, and not at a barrier with a deadline."""
        status, began = self._course.status, time.perf_counter()
        status.operation = "compile"
        self._kernel.compile()
        self._session.compile_s = time.perf_counter() - began
        status.operation = "compute"

    def _agreed(self, *wishes: bool) -> list[bool]:
        """What one worker wants, all do."""
        found = torch.tensor(wishes, dtype=torch.int64)
        self._session.group.all_reduce(found, "max")
        return [bool(wish) for wish in found]

    def _record(self, logs: Sequence[Log], steps: int, began_s: float, began_ns: int) -> int:
        """Write down what threads did since then, as so many steps of this worker; returns its samples."""
        course, session = self._course, self._session
        session.trace.add("stretch", began_s, course.clock.now(), batches=steps)
        clocks = np.concatenate([log.clock_ns for log in logs])
        in_order = clocks.argsort(kind="stable")
        losses = torch.from_numpy(np.concatenate([log.loss for log in logs])[in_order]).double()
        counts = torch.from_numpy(np.concatenate([log.samples for log in logs])[in_order]).double()
        seconds = began_s - course.began_s + torch.from_numpy(clocks[in_order] - began_ns) / 1e9
        course.ledger.add_all(Losses(losses, counts, seconds, torch.arange(len(losses)) + session.worker.step + 1))
        samples = int(counts.sum())
        session.count(steps, samples)
        return samples


class CompiledWorkers(Compiled):
    """A worker takes batches of an epoch by itself, then all meet.

    The strategy's own worker begins and ends as everywhere; what it would do for each gradient is what is compiled.
    """

    def __init__(self, course: Course, task: Task, train: SampleSet) -> None:
        super().__init__(course, task, train)
        plan = course.plan
        self._thread = self._kernel.worker(self._session.group.rank, plan.batch, plan.momentum)
        self._at = (0, 0)
        """The epoch, and how many of its batches were handed out."""
        course.steps_done = self._steps_done

    def run(self, optimizer: torch.optim.Optimizer, schedule: Schedule) -> dict[str, Any]:
        course, session = self._course, self._session
        self._compile()
        with self._kernel.running():
            session.begin(course.gradients.replica)
            kernel, workers = self._kernel, course.plan.workers
            sharing = session.strategy.compiled_sharing(
                kernel.dim, workers, sparse=not kernel.touches_all, by_rows=kernel.by_rows
            )
            if sharing is not None and sharing.by_rows and course.rank.comm.rank == 0:
                course.rank.tell("note", {"line": BY_ROWS}, b"")
            session.work(optimizer, optim.step_of(optimizer), course.plan.batch, sharing)
            shared = session.worker.shared
            assert isinstance(shared, MappedVector), "compiled workers run in real memory"
            self._shared = shared
            for name, vector in self._thread.kept().items():
                session.worker.keep(name, vector)
            course.rank.brake.on_stop = self._shared.stop
            course.rank.brake.passed(1)
            give_back_freed_memory()
            saved = course.begin(schedule)
            if saved:
                self._at = tuple(saved["at"])
            self._train()
            if session.strategy.sharing(self._kernel.dim, course.plan.workers) is None:
                self._read_shared()  # a strategy that shares nothing looks for its model in its own replica
            session.end()
            return course.end({"consensus_distance": None})

    def _train(self) -> None:
        course, plan, steps = self._course, self._course.plan, self._course.shards.steps
        while (done := self._steps_done()) < plan.steps:
            epoch, batches = self._at
            held = plan.steps if self._thread.falls else course.schedule.held
            ends = (done // each * each + each for each in (course.stride, held))
            until = min(*ends, (epoch + 1) * steps, plan.steps)
            wanted = (until - epoch * steps) * plan.workers  # batches of the epoch, until somebody looks at the model
            handed_out = self._run_stretch(epoch, batches, wanted)
            with course.clock.paused():
                stopped, due = self._agreed(course.rank.brake.purpose == "stop", course.time_to_save())
            cut_off, epoch_is_over = stopped and handed_out < wanted, until % steps == 0
            self._at = (epoch, handed_out) if cut_off else (epoch + 1, 0) if epoch_is_over else (epoch, wanted)
            is_last = not cut_off and until == plan.steps
            if until % course.stride == 0 and not is_last and not stopped:
                self._read_shared()
                if course.pulse(final=False, alike=True):
                    return
            due |= course.saves_at_the_end() if is_last else epoch_is_over and course.saves_after(epoch + 1)
            if (stopped or due) and course.save(lambda: {"at": list(self._at)}):
                return

    def _steps_done(self) -> int:
        (epoch, batches), plan = self._at, self._course.plan
        return min(epoch * self._course.shards.steps + batches // plan.workers, plan.steps)

    def _run_stretch(self, epoch: int, first: int, last: int) -> int:
        """Take batches of this epoch until only those from `last` on are left; returns where that was."""
        course, shared, session = self._course, self._shared, self._session
        course.status.stop()
        with course.clock.paused():
            order = course.shards.order(epoch).numpy()[: last * course.plan.batch]
            if session.worker.rank == 0:
                shared.hand_out(first)
            session.group.barrier()
        began_s, began_ns = course.clock.now(), time.monotonic_ns()
        course.status.uncounted = lambda: self._uncounted(epoch, first, last)
        end = self._thread.run_epoch(shared, order, self._rate(epoch, first, last))
        *_, course.status.lr = self._uncounted(epoch, first, last)
        course.status.uncounted = None
        if end == BROKEN_LOCK:
            name = session.strategy.name
            raise CommError(f"worker {session.worker.rank} could not get the {name} before the deadline")
        log = self._thread.log
        self._record([log], len(log.loss), began_s, began_ns)
        with course.clock.paused():  # who is early would go on, were nobody to look at the model
            session.group.barrier()  # nobody hands out any more
        return int(shared.control[NEXT])

    def _rate(self, epoch: int, first: int, last: int) -> float:
        """Of the epoch's batch 0 where the rate falls inside a stretch; else that of the stretch's middle for all."""
        if not self._thread.falls:
            return self._rate_after(epoch, (first + last) // 2)
        now, then = (self._rate_after(epoch, batches) for batches in (first, last))
        fall = (now - then) / max(last - first, 1)
        self._thread.fall(fall)
        return now + fall * first

    def _rate_after(self, epoch: int, batches: int) -> float:
        course = self._course
        return course.schedule.at(epoch * course.shards.steps + 1 + batches // course.plan.workers)

    def _uncounted(self, epoch: int, first: int, last: int) -> tuple[int, int, float]:
        """Of a stretch that is under way: this worker's share of the batches handed out, for who looks on."""
        plan, handed_out = self._course.plan, min(int(self._shared.control[NEXT]), last)
        steps = max(handed_out - first, 0) // plan.workers
        return steps, steps * plan.batch, self._rate_after(epoch, handed_out)

    def _read_shared(self) -> None:
        """The shared vector as all workers have left it."""
        x = self._course.gradients.replica.x
        with self._course.clock.paused():
            if self._session.worker.rank == 0:
                self._shared.snapshot(x)
            self._session.group.broadcast(x)
