"""Hocket's own training loop: the life of one rank in `hocket train`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hocket import optim
from hocket.core.comm import Rank
from hocket.core.errors import UserError
from hocket.core.message import Message
from hocket.core.replica import Replica
from hocket.drivers.course import Course
from hocket.drivers.feed import Pool
from hocket.drivers.gradients import WholeModel
from hocket.drivers.plan import Plan
from hocket.drivers.report import server_report
from hocket.drivers.schedule import Schedule
from hocket.drivers.session import FRAME, Session
from hocket.measure.trace import Trace
from hocket.tasks import SampleSet, Task


def run_rank(rank: Rank, plan: Plan, task: Task, train: SampleSet, test: SampleSet) -> dict[str, Any]:
    """One rank's part in a run: the first are workers, those behind them servers."""
    device = device_of(plan.device, rank.comm.rank)
    if device.type == "cpu":
        torch.set_num_threads(1)  # or the speed-up over one worker is fake
    session = Session(rank, plan.made_strategy, plan.workers, plan.seed, device, Trace(plan.trace))
    replica = Replica(task.build_model(plan.seed), device)
    if session.is_server:
        return _serve(session, plan, replica)
    course = Course(session, plan, task, WholeModel(task, replica, train.to(device)), train, test.to(device))
    optimizer = optim.make(plan.optimizer, replica, plan.lr, plan.momentum)
    schedule = Schedule(plan, optimizer, course.shards.steps)
    if plan.compiled:
        from hocket.drivers.compiled import CompiledWorkers  # Numba takes half a second to import

        return CompiledWorkers(course, task, train).run(optimizer, schedule)
    pool = None
    if not plan.made_strategy.lockstep:
        tickets = course.shards.steps * plan.workers
        meet_every, at_the_end = plan.checkpoint.epochs * tickets, course.saves_at_the_end()
        pool = Pool(session.group, plan.steps * plan.workers, meet_every, at_the_end)
    session.begin(replica)
    session.work(optimizer, optim.step_of(optimizer), plan.batch)
    position = course.begin(schedule)
    return train_in_step(course, position) if pool is None else FromPool(course, pool, position).run()


def _serve(session: Session, plan: Plan, replica: Replica) -> dict[str, Any]:
    """The life of a server rank."""
    x, g = session.part_of(replica.x), session.part_of(replica.g)
    # Before all begin: torch imports a second's worth of modules for its first optimizer
    optimizer = optim.make_flat(plan.optimizer, x, g, plan.lr, plan.momentum)
    session.begin(replica)
    clock = session.rank.clock
    began_s = session.trace.origin_s = clock.now()
    server = session.serve(x, g, optimizer, optim.step_of(optimizer))
    session.rank.tell("events", {"events": session.trace.take()}, b"")
    return server_report(session, server, clock.now() - began_s)


def device_of(name: str, rank: int) -> torch.device:
    """This rank's device; ranks share out the GPUs."""
    if name == "cpu":
        return torch.device("cpu")
    if not name.startswith("cuda"):
        raise UserError(f"device must be cpu or cuda, got {name!r}")
    if not torch.cuda.is_available():
        raise UserError("device cuda: PyTorch sees no GPU here; use --device cpu")
    return torch.device(name if ":" in name else f"cuda:{rank % torch.cuda.device_count()}")


def train_in_step(course: Course, saved: dict[str, Any] | None) -> dict[str, Any]:
    """All workers take their steps together, each with its own share, and meet at the end of every epoch."""
    session, steps, total = course.session, course.shards.steps, course.plan.steps
    brake, me = course.rank.brake, session.worker.rank
    judged = saved["judged"] if saved else 0  # the step at which the model was last looked at

    def position() -> dict[str, Any]:
        return {"judged": judged}

    for step in range(session.worker.step, total):
        if step % steps == 0 and step != judged:
            judged = step
            if course.pulse(final=False):
                break
            if course.saves_after(step // steps) and course.save(position):
                break
        course.train_on(step // steps, step % steps, me)
        course.mind_the_clock()
        if brake.pauses_after(step + 1) and course.save(position):
            break
    else:
        if course.saves_at_the_end():
            course.save(position)
    before = course.gradients.replica.values.clone()
    session.end()
    return course.end(course.own_replica(before))


class FromPool:
    """Each worker takes the next batch as soon as it has done with the last, and nobody waits for an epoch to end.

    At the first batch of an epoch somebody looks at the model that the run would return if it ended there: whoever
    has drawn it where that model lies in one place, else worker 0, to whom all send their replicas.
    """

    def __init__(self, course: Course, pool: Pool, saved: dict[str, Any] | None) -> None:
        self._course, self._pool, self._me = course, pool, course.session.worker.rank
        self._tickets = course.shards.steps * course.plan.workers
        """Of an epoch."""
        strategy = course.session.strategy
        self._scattered = not strategy.server_ranks() and "shared-memory" not in strategy.needs
        """Whether what counts is the mean of all replicas."""
        self._epoch = self._heard = 0
        self._sums: dict[int, list[Any]] = {}
        """Worker 0, by epoch: the sum of the replicas that have come in, how many, and when it passed itself."""
        if saved:
            pool.load_state(saved["pool"])
            self._epoch, self._heard, self._sums = saved["epoch"], saved["heard"], saved["sums"]
            with course.clock.free():
                course.session.group.barrier()
                course.clock.line_up()

    def run(self) -> dict[str, Any]:
        course, session = self._course, self._course.session
        steps = course.shards.steps
        for ticket in self._drawn():
            step, share = divmod(ticket, course.plan.workers)
            course.train_on(step // steps, step % steps, share)
        before = course.gradients.replica.values.clone()
        session.end()
        known: dict[str, Any] = {"consensus_distance": None}  # a worker has a copy of some age
        if self._scattered:
            with course.clock.free():
                last = torch.tensor([self._epoch])
                session.group.all_reduce(last, "max")
                self._pass(int(last), before)
                self._hear_all()
            known = course.own_replica(before)
        self._pool.close()
        return course.end(known)

    def _drawn(self) -> Iterator[int]:
        """Tickets to train on."""
        course, pool = self._course, self._pool
        while True:
            ticket = pool.draw()
            if pool.must_meet(course.rank.brake):
                if course.save(self._position):
                    return
                pool.rejoin()
                continue
            if ticket >= pool.total:
                return
            self._pass(ticket // self._tickets, course.gradients.replica.values)
            if ticket and ticket % self._tickets == 0 and not self._scattered:
                self._look(ticket // course.plan.workers)
            if self._scattered and self._me == 0:
                self._hear()
            yield ticket
            pool.spend()
            course.rank.brake.passed(course.session.worker.step)
            course.mind_the_clock()

    def _look(self, step: int) -> None:
        """Judge what the strategy would return now."""
        course = self._course
        now = course.clock.now() - course.began_s
        with course.clock.free():
            x = course.session.strategy.consensus(course.session.worker)
        assert x is not None, "what counts lies in one place"
        if course.judge_alone(step, now, x):
            self._pool.empty()

    def _pass(self, epoch: int, values: Tensor) -> None:
        """This worker goes on to an epoch, with a replica that has these values."""
        course = self._course
        while self._epoch < epoch:
            course.close_epoch(self._epoch)
            self._epoch += 1
            if not self._scattered:
                continue
            if self._me == 0:
                self._add(self._epoch, values, course.clock.now() - course.began_s)
            else:
                with course.clock.free():
                    course.session.group.isend(0, Message("replica", (self._epoch,), (values,)), FRAME)

    def _hear(self, timeout: float | None = 0.0) -> None:
        """Worker 0 takes in replicas that others have sent; without a time-out, the next one."""
        group = self._course.session.group
        with self._course.clock.free():
            try:
                while True:
                    _, msg = group.recv(tag=FRAME, timeout=timeout)
                    self._heard += 1
                    self._add(msg.ints[0], msg.tensors[0], 0.0)
                    if timeout is None:
                        return
            except TimeoutError:
                return

    def _hear_all(self) -> None:
        """Worker 0 takes in all replicas that were sent; all workers call it together."""
        passed = torch.tensor([self._epoch if self._me else 0])
        self._course.session.group.all_reduce(passed)
        while self._me == 0 and self._heard < int(passed):
            self._hear(timeout=None)

    def _add(self, epoch: int, values: Tensor, now: float) -> None:
        """Count a replica in; who has all of an epoch judges their mean."""
        course = self._course
        found = self._sums.setdefault(epoch, [torch.zeros_like(course.gradients.replica.values), 0, 0.0])
        found[0] += values.to(found[0].device)
        found[1] += 1
        found[2] = max(found[2], now)
        if found[1] == course.plan.workers:
            mean, count, when = self._sums.pop(epoch)
            if course.judge_alone(epoch * course.shards.steps, when, mean / count):
                self._pool.empty()

    def _position(self) -> dict[str, Any]:
        """Where all are when they meet, each with a ticket in its hand."""
        self._pool.met()
        if self._scattered:
            self._hear_all()
        self._course.session.group.barrier()
        return {"pool": self._pool.state(), "epoch": self._epoch, "heard": self._heard, "sums": self._sums}
