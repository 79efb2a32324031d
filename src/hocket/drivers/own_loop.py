"""Hocket's own training loop: the life of one rank in `hocket train`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hocket import optim
from hocket.core.comm import Rank
from hocket.core.errors import UserError
from hocket.core.replica import Memory, Replica, own_memory
from hocket.drivers.batched import BatchedModel
from hocket.drivers.course import Course
from hocket.drivers.feed import Pool
from hocket.drivers.from_pool import FromPool
from hocket.drivers.gradients import WholeModel
from hocket.drivers.held_back import held_back
from hocket.drivers.pipelined import Pipelined
from hocket.drivers.plan import Plan
from hocket.drivers.prefetch import Prefetched
from hocket.drivers.report import server_report
from hocket.drivers.schedule import Schedule
from hocket.drivers.session import Session
from hocket.drivers.split_model import seat, served_part, split_gradients
from hocket.layouts.mesh import Mesh
from hocket.layouts.portion import AllOfIt, Portion
from hocket.measure.trace import Trace
from hocket.tasks import SampleSet, Task


def run_rank(rank: Rank, plan: Plan, task: Task, train: SampleSet, test: SampleSet) -> dict[str, Any]:
    """One rank's part in a run: the first are workers, those behind them servers."""
    if rank.comm.rank >= plan.training_ranks:
        return serve_rank(rank, plan, task)
    device = device_of(plan.device, 0 if plan.batched else rank.comm.rank)
    train, validation = held_back(plan, task, train)
    session, source = _source(rank, plan, task, train.to(device), device)
    replica = source.replica
    judged = validation.to(device) if validation else None
    course = Course(session, plan, task, source, train, test.to(device), judged)
    optimizer = optim.make(plan.optimizer, replica, plan.lr, plan.momentum)
    schedule = Schedule(plan, optimizer, course.shards.steps, task.own_schedule)
    if plan.compiled and plan.made_strategy.threads_inside:
        from hocket.drivers.compiled_replicas import CompiledReplicas

        return CompiledReplicas(course, task, train).run(optimizer, schedule)
    if plan.compiled:
        from hocket.drivers.compiled import CompiledWorkers  # Numba takes half a second to import

        return CompiledWorkers(course, task, train).run(optimizer, schedule)
    pool = None
    if not plan.made_strategy.lockstep:
        tickets = course.shards.steps * plan.workers
        meet_every, at_the_end = plan.checkpoint.epochs * tickets, course.saves_at_the_end()
        pool = Pool(session.group, plan.steps * plan.workers, meet_every, at_the_end, session.ensemble)
    session.begin(replica, source.portion)
    if isinstance(source, BatchedModel) and pool is None:
        with rank.clock.paused():
            source.rehearse(course.shards)
    session.work(optimizer, _step_of(optimizer, plan, replica.g, source.portion.length), plan.batch)
    position = course.begin(schedule)
    if pool is not None:
        return FromPool(course, pool, position).run()
    if not plan.loaders:
        return train_in_step(course, position)
    source.train = loaded = Prefetched(train, plan.loaders, course.upcoming, plan.seed, session.worker.rank)
    try:
        with rank.clock.paused():
            loaded.start(session.everyone)
        return train_in_step(course, position)
    finally:
        loaded.close()


def _step_of(
    optimizer: torch.optim.Optimizer, plan: Plan, g: Tensor, length: optim.Length = torch.linalg.vector_norm
) -> Callable[[], object]:
    """A step of the optimizer. Where workers go in step it is there that a gradient is clipped, after all that the
    strategy does to it; elsewhere each worker has clipped its own."""
    return optim.clipped(optim.step_of(optimizer), g, plan.clip if plan.made_strategy.lockstep else 0.0, length)


def _source(
    rank: Rank, plan: Plan, task: Task, train: SampleSet, device: torch.device
) -> tuple[Session, WholeModel | Pipelined]:
    """This rank's session, and where its gradients come from."""
    if plan.made_layout.ranks > 1:
        mesh = Mesh(rank.comm, plan.made_layout)
        session = _session(seat(rank, mesh), plan, device, mesh)
        return session, split_gradients(session, mesh, plan, task, train, device)
    session, model = _session(rank, plan, device), task.build_model(plan.seed)
    if plan.batched:
        assert rank.turns is not None, "only where ranks take turns"
        place, in_step = (plan.workers, rank.comm.rank), plan.made_strategy.lockstep
        return session, BatchedModel(task, train, *place, model, device, rank.turns, in_step=in_step)
    replica = Replica(model, device, _memory(rank, plan, model))
    return session, WholeModel(task, replica, train, piece=plan.piece, autocast=plan.autocasts)


def _memory(rank: Rank, plan: Plan, model: nn.Module) -> Memory:
    """Compiled workers of one shared vector only look at it through their replicas, and all see the same: for those of
    one process, one memory will do."""
    only_look = plan.compiled and not plan.made_strategy.threads_inside and not list(model.buffers())
    return rank.together if only_look else own_memory


def _session(rank: Rank, plan: Plan, device: torch.device, mesh: Mesh | None = None) -> Session:
    if device.type == "cpu":
        torch.set_num_threads(plan.made_strategy.threads)  # one, or the speed-up over one worker is fake
    trace = Trace(plan.trace, fine=plan.timeline)
    return Session(rank, plan.made_strategy, plan.workers, plan.seed, device, trace, plan.made_compressor, mesh)


def serve_rank(rank: Rank, plan: Plan, task: Task) -> dict[str, Any]:
    """The life of a server rank, which needs no samples."""
    device = device_of(plan.device, rank.comm.rank)
    session, replica, portion = _served(rank, plan, task, device)
    x, g = session.part_of(replica.x), session.part_of(replica.g)
    # Before all begin: torch may have a second's worth of modules to import for it
    optimizer = optim.make_flat(plan.optimizer, x, g, plan.lr, plan.momentum)
    step = _step_of(optimizer, plan, g, portion.length)
    session.begin(replica, portion)
    clock = session.rank.clock
    began_s = session.trace.origin_s = clock.now()
    server = session.serve(x, g, optimizer, step)
    session.rank.tell("events", {"events": session.trace.take()}, b"")
    return server_report(session, server, clock.now() - began_s)


def _served(rank: Rank, plan: Plan, task: Task, device: torch.device) -> tuple[Session, Replica, Portion]:
    """A server's session, and the model that it serves, or the part of it."""
    if plan.made_layout.ranks == 1:
        replica = Replica(task.build_model(plan.seed), device)
        return _session(rank, plan, device), replica, AllOfIt(replica)
    mesh = Mesh(rank.comm, plan.made_layout)
    session = _session(seat(rank, mesh), plan, device, mesh)
    placed = served_part(session, mesh, plan, task, device)
    return session, placed.replica, placed.portion


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
        if step % steps == 0:
            course.epochs_are_over(step // steps)
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
    values = course.gradients.replica.values
    before = values.clone() if session.group.size > 1 else values
    session.end()
    return course.end(course.own_replica(before))
