"""Workers that each train a replica of their own in compiled threads, and agree now and then."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from hocket import optim
from hocket.core.threaded import Threaded
from hocket.core.weight import Weight
from hocket.drivers.compiled import Compiled
from hocket.drivers.course import Course
from hocket.drivers.schedule import Schedule
from hocket.kernels.memory.vector import MappedVector
from hocket.tasks import SampleSet, Task


class CompiledReplicas(Compiled):
    """The threads of a worker take its batches of a few steps, then the strategy hears of it.

    They share the worker's replica where it lies, without locks; no other worker sees it.
    """

    def __init__(self, course: Course, task: Task, train: SampleSet) -> None:
        super().__init__(course, task, train)
        plan, kernel = course.plan, self._kernel
        assert isinstance(plan.made_strategy, Threaded)
        self._strategy = plan.made_strategy
        me, threads = self._session.group.rank, self._strategy.threads_inside
        self._threads = [kernel.worker(me * threads + i, plan.batch, plan.momentum) for i in range(threads)]
        self._hot = kernel.hot(self._strategy.hot)

    def run(self, optimizer: torch.optim.Optimizer, schedule: Schedule) -> dict[str, Any]:
        course, session = self._course, self._session
        self._compile()
        session.begin(course.gradients.replica)
        worker = session.work(optimizer, optim.step_of(optimizer), course.plan.batch)
        for i, thread in enumerate(self._threads):
            for name, vector in thread.kept().items():
                worker.keep(f"{name}/{i}", vector)
        course.rank.brake.passed(1)
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
                (stopped,) = self._agreed(course.rank.brake.purpose == "stop" or course.time_to_save())
            ends_epoch = until % steps == 0 and course.saves_after(until // steps)
            due = course.saves_at_the_end() if until == plan.steps else ends_epoch
            if (stopped or due) and course.save(dict):
                return

    def _take(self, crew: ThreadPoolExecutor, first: int, last: int) -> int:
        """Train on this worker's share of the steps from `first` to before `last`, of one epoch; its samples."""
        course, worker = self._course, self._session.worker
        course.status.stop()
        epoch, at = divmod(first, course.shards.steps)
        shares = [course.shards.batch(epoch, at + i, worker.rank) for i in range(last - first)]
        order = torch.cat(shares).numpy()
        course.status.lr = rate = course.schedule.at((first + last) // 2 + 1)
        began_s, began_ns = course.clock.now(), time.monotonic_ns()
        self._views[0].hand_out(0)
        seats = zip(self._threads, self._views, strict=True)
        running = [crew.submit(thread.run_epoch, view, order, rate) for thread, view in seats]
        for thread in running:
            thread.result()
        return self._record([thread.log for thread in self._threads], last - first, began_s, began_ns)
