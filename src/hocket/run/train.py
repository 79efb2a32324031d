"""RunSpec -> Training -> Result: decide and check everything, then run the ranks and record what they tell."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hocket.compress import Identity
from hocket.core.comm import Rank
from hocket.core.environment import launched_rank
from hocket.core.errors import UserError
from hocket.core.replica import Replica
from hocket.core.seeds import generators_as_they_were
from hocket.core.shard import Shards
from hocket.drivers.all_at_once import run_all
from hocket.drivers.checkpoint import about_run, epochs_done
from hocket.drivers.fitting import layout_of
from hocket.drivers.held_back import held_back
from hocket.drivers.own_loop import device_of, run_rank
from hocket.drivers.plan import Cadence, Plan
from hocket.drivers.split_model import norms_apart
from hocket.engines.catalogue import Engine, Light, Program, engine
from hocket.layouts.mesh import Layout
from hocket.measure.folder import RunFolder
from hocket.measure.result import Result
from hocket.run.batching import batching
from hocket.run.blame import blaming
from hocket.run.choice import best_engine, engine_class, make_engine, named_engine
from hocket.run.idle import idle_note
from hocket.run.loading import absolute, find_name, load_task
from hocket.run.past import read_best, read_curve
from hocket.run.place import check_name
from hocket.run.progress import Display, Silent
from hocket.run.record import About, Recorder
from hocket.run.rehearsal import too_high
from hocket.run.resolve import resolve, settled
from hocket.run.room import check_processes, room
from hocket.run.signals import Interrupts
from hocket.run.spec import RunSpec
from hocket.run.trial import try_out
from hocket.strategies import Strategy, strategy
from hocket.tasks import SampleSet, Task
from hocket.tasks import task as task_registry
from hocket.tasks.base import most_frequent


@dataclass(frozen=True)
class Training:
    """A training that can start: all is decided and checked, nothing is started or written yet."""

    spec: RunSpec
    """With every default filled in."""
    plan: Plan
    engine: Engine
    task: Task
    given: SampleSet
    """All that may be trained on."""
    train: SampleSet
    """Without what is kept back."""
    test: SampleSet
    title: str
    notes: tuple[str, ...] = ()
    """What the user may want to know before it starts, a line each."""

    @property
    def is_root(self) -> bool:
        """Whether this process speaks for the run; those that a launcher started beside it stay silent."""
        return self.engine.starts_processes() or launched_rank() == 0

    @property
    def epochs(self) -> float:
        """How many passes over the data it makes."""
        plan = self.plan
        return plan.steps / Shards(len(self.train), plan.workers, plan.batch, plan.seed).steps

    def run(
        self,
        out: Path | None = None,
        *,
        force: bool = False,
        display: Display | None = None,
        asked_s: float | None = None,
    ) -> Result:
        """Train. Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt when the record is finished.

        `asked_s` is when the run was asked for, by `time.monotonic`, if that was before this call.
        """
        asked_s = time.monotonic() if asked_s is None else asked_s
        if self.is_root and not out and self.plan.checkpoint != Cadence():
            raise UserError("checkpoints need a folder; give one with out=")
        if self.is_root and not out and self.plan.timeline:
            raise UserError("a timeline needs a folder; give one with out=")
        resumed_at = epochs_done(Path(self.plan.resume)) if self.plan.resume else None
        with Interrupts(), _torch_as_it_was():
            if display and self.is_root:
                found = idle_note(self.plan.strategy), too_high(self.plan, self.task, self.train), *self.task.notes()
                for note in filter(None, (*found, *self.notes)):
                    display.note(note)
            about = About(
                self.plan,
                self.task,
                self.spec.engine or "",
                self.engine.virtual_time,
                self.task.target if self.spec.target is None else self.spec.target,
                most_frequent(self.test) if self.task.metric_is_share else None,
                read_curve(out, resumed_at) if out and resumed_at is not None else [],
                read_best(out) if out and resumed_at is not None else None,
            )
            folder = self._folder(out, force, resumed_at) if out and self.is_root else None
            recorder = Recorder(about, folder, display if display and self.is_root else Silent(), asked_s)
            ranks = self.plan.training_ranks + self.plan.servers
            result = recorder.record(self.title, lambda: self.engine.run(self._main(), ranks, recorder))
            if result.verdict == "interrupted":
                raise KeyboardInterrupt
            return result

    def _folder(self, out: Path, force: bool, resumed_at: float | None) -> RunFolder:
        check_name(out)
        folder = RunFolder(out, self.spec.to_toml(), force=force, resumed=resumed_at is not None)
        if resumed_at is not None:
            folder.rewind(resumed_at)
        return folder

    def _main(self) -> Callable[[Rank], Any]:
        if self.engine.starts_processes():
            return Program("hocket.run.rank:run_program", self.plan.to_json())
        if self.engine.drives_all:
            return lambda rank: run_all(rank, self.plan, self.task, self.given, self.test)

        def main(rank: Rank) -> Any:
            return run_rank(rank, self.plan, self.task, self.given, self.test)

        # Ranks that hold parts of one model talk to each other inside autograd
        return main if self.plan.layout else Light(main)


def train(
    spec: RunSpec,
    task: Task | None = None,
    *,
    out: Path | None = None,
    force: bool = False,
    display: Display | None = None,
) -> Result:
    """Run one training. `task` is a user's own object; without it `spec.task` names one."""
    asked_s = time.monotonic()
    return prepare(spec, task).run(out, force=force, display=display, asked_s=asked_s)


def prepare(spec: RunSpec, task: Task | None = None, *, resume: str = "") -> Training:
    """Decide everything, and refuse what cannot run. `resume` is the checkpoint to go on from."""
    found = absolute(spec.task, task_registry), absolute(spec.strategy, strategy)
    spec = dataclasses.replace(spec, task=found[0], strategy=found[1])
    if task is not None and not spec.task:
        spec = dataclasses.replace(spec, task=find_name(task) or "")
    task = task or load_task(spec.task, spec.seed, spec.data, spec.test_data)
    spec = dataclasses.replace(spec, strategy=spec.strategy or task.strategy)
    with blaming("Task.data"):
        all_samples, test_samples = task.load()
    text, reason = named_engine(spec)
    spec = dataclasses.replace(spec, workers=_workers(spec, text))
    plan = resolve(spec, task, len(all_samples))
    if resume:
        plan = dataclasses.replace(plan, resume=resume, layout=layout_of(about_run(Path(resume)), plan.layout))
    with blaming("Task.validation"):
        train_samples, _ = held_back(plan, task, all_samples)
    plan = dataclasses.replace(plan, compiled=_is_compiled(spec.driver, text, plan, task, train_samples))
    if not text:
        text, reason = best_engine(plan.made_strategy.needs, compiled=plan.compiled, named=bool(spec.task))
    elif plan.compiled:
        reason = " (compiled workers)"
    spec = _with_room(spec, plan.made_strategy)
    chosen = make_engine(spec, text, plan.training_ranks)
    if not spec.hosts:
        check_processes(chosen, plan)
    device_of(plan.device, 0)
    _check_loaders(plan, train_samples)
    model = try_out(plan, task, train_samples, test_samples)
    _check_engine(plan, chosen, spec.hosts, model)
    plan.made_compressor.check_model([p.shape for p in model.parameters])
    plan, note = batching(chosen, plan, task, train_samples)
    told = [_smaller_batch(spec, task, plan), room(chosen, plan, model), norms_apart(plan, model.model), note]
    notes = tuple(filter(None, [*told, chosen.note()]))
    title = _title(plan, f"engine {text}{reason}")
    settled_spec = settled(spec, task, plan, text)
    return Training(settled_spec, plan, chosen, task, all_samples, train_samples, test_samples, title, notes)


def _workers(spec: RunSpec, text: str) -> int | None:
    """As many as were asked for, or as a launcher has started or the hosts have room for, less the servers."""
    if spec.workers is not None or not text or not (ranks := engine_class(text).room(spec.hosts)):
        return spec.workers
    parts = Layout.parse(spec.layout).ranks
    servers = strategy.make(spec.strategy).server_ranks() * parts
    if ranks < servers + parts:
        least = servers + parts
        raise UserError(f"{ranks} ranks leave no worker beside {servers} servers; start {least} ranks or more")
    return ranks - servers


def _smaller_batch(spec: RunSpec, task: Task, plan: Plan) -> str:
    """A line for the user, where so many workers share the samples that none has as many as the task's batch."""
    if spec.batch is not None or plan.piece == task.batch:
        return ""
    return f"batch {plan.piece} in place of the task's {task.batch}: a worker has no more samples"


def _with_room(spec: RunSpec, wanted: Strategy) -> RunSpec:
    """A worker of several threads needs more than one core."""
    if max(wanted.threads, wanted.threads_inside) == 1 or spec.bind == "none":
        return spec
    if spec.bind == "core":
        raise UserError(f"--bind core gives a worker one core, and those of {wanted.name} have several threads here")
    return dataclasses.replace(spec, bind="none")


def _is_compiled(driver: str, text: str, plan: Plan, task: Task, train: SampleSet) -> bool:
    """Whether the workers run compiled: if that was asked for, and in shared memory wherever they can."""
    if plan.layout and driver == "compiled":
        raise UserError("compiled workers have whole models; leave --layout out, or use --driver pytorch")
    wanted = plan.made_strategy
    if wanted.threads_inside and (plan.layout or driver == "pytorch" or not isinstance(plan.made_compressor, Identity)):
        raise UserError(f"{wanted.name}: hogwild threads are compiled, and have whole models: leave hogwild out")
    by_itself = "shared-memory" in wanted.needs or wanted.threads_inside
    if plan.layout or driver == "pytorch" or (driver == "auto" and not by_itself):
        return False
    why_not = _why_not_compiled(text, plan, task, train)
    if why_not and wanted.threads_inside:
        raise UserError(f"{why_not}; leave hogwild out")
    if why_not and driver == "compiled":
        raise UserError(f"{why_not}; use --driver pytorch")
    return not why_not


def _why_not_compiled(text: str, plan: Plan, task: Task, train: SampleSet) -> str:
    """Empty if the workers can run compiled on an engine; one without a name is still to be chosen."""
    inside = bool(plan.made_strategy.threads_inside)
    if text and not _runs_compiled(engine_class(text), inside):
        able = " or ".join(name for name in engine if _runs_compiled(engine[name], inside))
        return f"compiled workers run on engine {able}, not on {text}"
    if plan.made_strategy.compiled_sharing(1, plan.workers) is None:
        return f"strategy {plan.made_strategy.name} has no compiled workers"
    from hocket.drivers.compiled import kernel_for  # Numba takes half a second to import

    with blaming("Task.model"):
        if kernel_for(plan, task, train) is not None:
            return ""
    if not plan.is_plain or plan.device != "cpu" or task.on_step or task.on_epoch:
        beside = "warm-up, schedule, clipping, accumulation, autocast, loaders or callbacks"
        return f"compiled workers take steps of plain sgd on the CPU, without {beside}"
    return f"task {Path(plan.task).name or 'task'} has no compiled form: Hocket compiles perceptrons and its own models"


def _runs_compiled(kind: type[Engine], inside: bool) -> bool:
    """Whether an engine has compiled workers; threads inside a worker run wherever time is real."""
    return not kind.virtual_time if inside else kind.runs_compiled


def _check_loaders(plan: Plan, train: SampleSet) -> None:
    if plan.loaders and not train.is_read_one_by_one:
        raise UserError(
            "loaders are for a Dataset that gives one sample at a time; this task's need none: leave them out"
        )
    if plan.loaders and not plan.made_strategy.lockstep:
        name = plan.made_strategy.name
        raise UserError(f"loaders must know the batches to come; workers of {name} draw theirs: leave --loaders out")


def _check_engine(plan: Plan, chosen: Engine, hosts: str, model: Replica) -> None:
    """Refuse a strategy and an engine that do not go together."""
    wanted = plan.made_strategy
    if missing := wanted.needs - chosen.offers:
        able = [name for name in engine if wanted.needs <= engine[name].offers]
        raise UserError(
            f"strategy {wanted.name} needs {', '.join(sorted(missing))}, which engine {chosen.name} lacks; "
            f"use --engine {' or '.join(able)}"
        )
    if "shared-memory" in wanted.needs and not chosen.virtual_time:
        here = {"", "localhost", "127.0.0.1", socket.gethostname().lower()}
        if {host.strip().partition(":")[0].lower() for host in hosts.split(",")} - here:
            raise UserError(f"strategy {wanted.name} shares memory, which is on one machine; leave --hosts out")
        if model.x.dtype != torch.float32 or plan.device != "cpu":
            what = f"device {plan.device}" if plan.device != "cpu" else str(model.x.dtype).removeprefix("torch.")
            raise UserError(f"strategy {wanted.name} shares float32 parameters in main memory; got {what}")
    if chosen.starts_processes() and not plan.task:
        able = [name for name in engine if engine[name].preference and not engine[name]().starts_processes()]
        raise UserError(
            f"engine {chosen.name} starts fresh processes, which must find the task by name: define it at the top "
            f"level of a file and pass 'path/to/file.py:task', or use engine={' or '.join(map(repr, able))}"
        )
    chosen.check(plan.training_ranks)


@contextmanager
def _torch_as_it_was() -> Iterator[None]:
    """Give the caller's PyTorch its threads and its random state back: ranks may run in this process."""
    threads = torch.get_num_threads()
    with generators_as_they_were():
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def brief(text: str) -> str:
    """A task or strategy as people read it: one in a user's file without the folders before it."""
    place, found, rest = text.partition(".py:")
    return Path(place).name + found + rest


def _title(plan: Plan, where: str) -> str:
    workers = "1 worker" if plan.workers == 1 else f"{plan.workers} workers"
    if plan.layout:
        workers += f", {plan.training_ranks} ranks ({plan.layout})"
    task = brief(plan.task) or "task"
    how = f"batch {plan.batch} a worker, {plan.optimizer} at {plan.lr:g}"
    compressed = "" if isinstance(plan.made_compressor, Identity) else f" with {plan.compress}"
    return f"{task}: {brief(plan.strategy)}{compressed} on {workers}, {where}, {how}"
