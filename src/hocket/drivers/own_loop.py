"""Hocket's own training loop: the life of one rank in `hocket train`."""

from __future__ import annotations

from typing import Any

import torch

from hocket import optim
from hocket.core.comm import Rank
from hocket.core.errors import UserError
from hocket.core.replica import Replica
from hocket.drivers.batched import BatchedModel
from hocket.drivers.course import Course
from hocket.drivers.feed import Pool
from hocket.drivers.from_pool import FromPool
from hocket.drivers.gradients import Gradients, WholeModel
from hocket.drivers.plan import Plan
from hocket.drivers.report import server_report
from hocket.drivers.schedule import Schedule
from hocket.drivers.session import Session
from hocket.measure.trace import Trace
from hocket.tasks import SampleSet, Task


def run_rank(rank: Rank, plan: Plan, task: Task, train: SampleSet, test: SampleSet) -> dict[str, Any]:
    """One rank's part in a run: the first are workers, those behind them servers."""
    device = device_of(plan.device, 0 if plan.batched else rank.comm.rank)
    if device.type == "cpu":
        torch.set_num_threads(1)  # or the speed-up over one worker is fake
    session = Session(rank, plan.made_strategy, plan.workers, plan.seed, device, Trace(plan.trace))
    model = task.build_model(plan.seed)
    if session.is_server:
        return _serve(session, plan, Replica(model, device))
    gradients: Gradients
    if plan.batched:
        assert rank.turns is not None, "only where ranks take turns"
        gradients = BatchedModel(task, train.to(device), plan.workers, rank.comm.rank, model, device, rank.turns)
    else:
        gradients = WholeModel(task, Replica(model, device), train.to(device))
    replica = gradients.replica
    course = Course(session, plan, task, gradients, train, test.to(device))
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
    # The steps after which the model was last looked at, and the run saved because it was time
    judged, kept = (saved["judged"], saved["kept"]) if saved else (0, 0)

    def position() -> dict[str, Any]:
        return {"judged": judged, "kept": kept}

    for step in range(session.worker.step, total):
        if step % course.stride == 0 and step != judged:
            judged = step
            if course.pulse(final=False):
                break
        if step % steps == 0 and step != kept:
            kept = step
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
