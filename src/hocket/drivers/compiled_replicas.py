"""Workers that each train a replica of their own in compiled threads, and agree now and then."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from hocket import optim
from hocket.core.threaded import Threaded
from hocket.core.weight import Weight
from hocket.drivers.compiled import kernel_for
from hocket.drivers.course import Course
from hocket.drivers.schedule import Schedule
from hocket.kernels.memory.vector import MappedVector
from hocket.kernels.memory.words import NEXT
from hocket.measure.losses import Losses
from hocket.tasks import SampleSet, Task


class CompiledReplicas:
    """A source of steps: the threads of a worker take its batches of a few steps, then the strategy hears of it.

    They share the worker's replica where it lies, without locks; no other worker sees it.
    """

    def __init__(self, course: Course, task: Task, train: SampleSet) -> None:
        self._course, self._session, plan = course, course.session, course.plan
        assert isinstance(plan.made_strategy, Threaded)
        self._strategy = plan.made_strategy
        kernel = kernel_for(plan, task, train)
        assert kernel is not None and kernel.dim == course.gradients.replica.x.numel(), "the kernel is another model's"
        self._kernel = kernel
        me, threads = self._session.group.rank, self._strategy.threads_inside
        self._threads = [kernel.worker(me * threads + i, plan.batch, plan.momentum) for i in range(threads)]
        self._hot = kernel.hot(self._strategy.hot)

    def run(self, optimizer: torch.optim.Optimizer, schedule: Schedule) -> dict[str, Any]:
        course, session = self._course, self._session
        course.status.operation = "compile"
        began = time.perf_counter()
        self._kernel.compile()
        session.compile_s = time.perf_counter() - began
        course.status.operation = "compute"
        session.begin(course.gradients.replica)
        worker = session.work(optimizer, optim.step_of(optimizer), course.plan.batch)
        for i, thread in enumerate(self._threads):
            for name, vector in thread.kept().items():
                worker.keep(f"{name}/{i}", vector)
        course.begin(schedule)
        sharing = self._strategy.compiled_sharing(self._kernel.dim, 1)
        assert sharing is not None, "the strategy has compiled threads"
        shared = MappedVector.around(sharing, worker.x)
        self._views = [shared.seen_by(i) for i in range(len(self._threads))]
        with self._kernel.running(), ThreadPoolExecutor(len(self._threads)) as crew:
            self._train(crew)
        before = course.gradients.replica.values.clone()
        session.end()
        return course.end(course.own_replica(before))

    def _train(self, crew: ThreadPoolExecutor) -> None:
        course, plan, steps = self._course, self._course.plan, self._course.shards.steps
        worker, every = self._session.worker, self._strategy.every
        while (done := worker.step) < plan.steps:
            until = min(*(done // each * each + each for each in (every, course.stride, steps)), plan.steps)
            samples = self._take(crew, done, until)
            of_all = sum(course.shards.step_samples(step % steps) for step in range(done, until))
            self._strategy.took(worker, Weight(samples, of_all), self._hot)
            if worker.step % course.stride == 0 and worker.step < plan.steps and course.pulse(final=False):
                return
            with course.clock.paused():
                stopped = self._wanted(course.rank.brake.purpose == "stop" or course.time_to_save())
            ends_epoch = until % steps == 0 and course.saves_after(until // steps)
            due = course.saves_at_the_end() if until == plan.steps else ends_epoch
            if (stopped or due) and course.save(dict):
                return

    def _wanted(self, wish: bool) -> bool:
        """What one worker wants, all do."""
        found = torch.tensor([int(wish)])
        self._session.group.all_reduce(found, "max")
        return bool(found)

    def _take(self, crew: ThreadPoolExecutor, first: int, last: int) -> int:
        """Train on this worker's share of the steps from `first` to before `last`, of one epoch; its samples."""
        course, session, worker = self._course, self._session, self._session.worker
        course.status.stop()
        epoch, at = divmod(first, course.shards.steps)
        shares = [course.shards.batch(epoch, at + i, worker.rank) for i in range(last - first)]
        order = torch.cat(shares).numpy()
        rate = course.schedule.at((first + last) // 2 + 1)
        began_s, began_ns = course.clock.now(), time.monotonic_ns()
        self._views[0].control[NEXT] = 0
        seats = zip(self._threads, self._views, strict=True)
        running = [crew.submit(thread.run_epoch, view, order, rate) for thread, view in seats]
        for thread in running:
            thread.result()
        session.trace.add("stretch", began_s, course.clock.now(), batches=last - first)
        logs = [thread.log for thread in self._threads]
        clocks = torch.from_numpy(np.concatenate([log.clock_ns for log in logs]) - began_ns)
        in_order = clocks.argsort()
        losses = torch.from_numpy(np.concatenate([log.loss for log in logs])).double()[in_order]
        counts = torch.from_numpy(np.concatenate([log.samples for log in logs])).double()[in_order]
        seconds = began_s - course.began_s + clocks[in_order] / 1e9
        course.ledger.add_all(Losses(losses, counts, seconds, torch.arange(len(losses)) + worker.step + 1))
        session.count(last - first, int(counts.sum()))
        return int(counts.sum())
