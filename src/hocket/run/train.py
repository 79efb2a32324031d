"""RunSpec -> Result: choose the engine, run the ranks, record what they tell."""

from __future__ import annotations

import dataclasses
import math
import socket
import traceback as tb
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hocket import optim
from hocket.core.comm import Rank
from hocket.core.environment import inside_mpi, inside_torchrun, launched_rank, launched_size
from hocket.core.errors import RankFailed, UserError
from hocket.core.replica import Replica
from hocket.core.shard import Shards
from hocket.core.status import Status
from hocket.drivers.own_loop import device_of, run_rank
from hocket.engines import mpi
from hocket.engines.catalogue import Listener, Program, engine
from hocket.measure.folder import RunFolder
from hocket.measure.losses import PARTS
from hocket.measure.result import Result, Verdict, staleness_summary, versions
from hocket.run.progress import Display, Silent
from hocket.run.spec import RunSpec, find_name, load_task
from hocket.tasks import SampleSet, Task

__all__ = ["train"]


def train(
    spec: RunSpec,
    task: Task | None = None,
    *,
    out: Path | None = None,
    force: bool = False,
    display: Display | None = None,
) -> Result:
    """Run one training. `task` is a user's own object; without it `spec.task` names one."""
    display = display or Silent()
    if ".py:" in spec.task:  # wherever the spec is read again, it means this file
        path, _, name = spec.task.rpartition(":")
        spec = dataclasses.replace(spec, task=f"{Path(path).resolve()}:{name}")
    given, task = task, task or load_task(spec.task, spec.seed, spec.data, spec.test_data)
    train_samples, test_samples = task.load()
    spec, reason = _choose_engine(spec, given, task, train_samples)
    spec = spec.resolved(task)
    chosen = spec.make_engine()
    assert spec.workers and spec.batch and spec.engine
    strategy = spec.make_strategy()
    if missing := strategy.needs - chosen.offers:
        able = [n for n in engine if strategy.needs <= engine[n].offers]
        raise UserError(
            f"strategy {strategy.name} needs {', '.join(sorted(missing))}, which engine {chosen.name} lacks; "
            f"use --engine {' or '.join(able)}"
        )
    ranks = spec.workers + strategy.server_ranks()
    chosen.check(spec.workers)
    device_of(spec.device, 0)
    _check_batch(spec, len(train_samples))
    _check_model(spec, task)
    if chosen.name == "threads":
        _is_compiled(spec, task, train_samples)  # refuses what compiled workers cannot do

    def in_this_process(rank: Rank) -> Any:
        return run_rank(rank, spec, task, train_samples, test_samples)

    main: Callable[[Rank], Any] = in_this_process
    if chosen.starts_processes():
        if not spec.task:
            raise UserError(
                f"engine {chosen.name} starts fresh processes, which must find the task by name: define it at the top "
                f"level of a file and pass 'path/to/file.py:task', or use engine='threads'"
            )
        main = Program("hocket.drivers.own_loop:run_program", dataclasses.asdict(spec))

    is_root = chosen.starts_processes() or launched_rank() == 0
    folder = RunFolder(out, spec.to_toml(), force=force) if out and is_root else None
    recorder = Recorder(spec, task, folder, display if is_root else Silent())
    steps = spec.steps or Shards(len(train_samples), spec.workers, spec.batch, spec.seed).steps * (spec.epochs or 1)
    recorder.begin(_title(spec, reason), steps)
    with _torch_as_it_was():
        return recorder.record(lambda: chosen.run(main, ranks, recorder))


@contextmanager
def _torch_as_it_was() -> Iterator[None]:
    """Give the caller's PyTorch its threads and its random state back: ranks may run in this process."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _title(spec: RunSpec, reason: str) -> str:
    workers = "1 worker" if spec.workers == 1 else f"{spec.workers} workers"
    where = f"engine {spec.engine}{reason}"
    return f"{Path(spec.task).name or 'task'}: {spec.strategy} on {workers}, {where}, batch {spec.batch} a worker"


def _check_model(spec: RunSpec, task: Task) -> None:
    """Build what every rank will build: a mistake shows here, before anything is started or written."""
    assert spec.optimizer and spec.lr and spec.momentum is not None
    model = Replica(task.build_model(spec.seed))
    strategy = spec.make_strategy()
    shares = "shared-memory" in strategy.needs and spec.make_engine().name != "sim"
    if strategy.server_ranks() > model.x.numel():
        raise UserError(
            f"{strategy.server_ranks()} servers cannot share {model.x.numel()} parameters; use fewer servers"
        )
    here = {"", "localhost", "127.0.0.1", socket.gethostname().lower()}
    if shares and {host.strip().partition(":")[0].lower() for host in spec.hosts.split(",")} - here:
        raise UserError(f"strategy {strategy.name} shares memory, which is on one machine; leave --hosts out")
    if spec.hosts and spec.make_engine().name != "mpi":
        raise UserError(f"--hosts is for the engine mpi; engine {spec.make_engine().name} runs on this machine alone")
    if shares and (model.x.dtype != torch.float32 or spec.device != "cpu"):
        what = f"device {spec.device}" if spec.device != "cpu" else str(model.x.dtype).removeprefix("torch.")
        raise UserError(f"strategy {strategy.name} shares float32 parameters in main memory; got {what}")
    try:
        optim.make(spec.optimizer, model, spec.lr, spec.momentum)
        if strategy.server_ranks():
            optim.make_flat(spec.optimizer, model.x, model.g, spec.lr, spec.momentum)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"optimizer {spec.optimizer}: {error}") from error


def _check_batch(spec: RunSpec, samples: int) -> None:
    assert spec.workers and spec.batch
    shard = samples // spec.workers
    if shard == 0:
        raise UserError(f"{spec.workers} workers cannot share {samples} samples; use --workers {samples} or fewer")
    if spec.batch > shard:
        workers = "1 worker" if spec.workers == 1 else f"{spec.workers} workers"
        raise UserError(
            f"batch {spec.batch} is larger than a worker's shard of {shard} samples "
            f"({samples} samples, {workers}); use --batch {shard} or fewer workers"
        )


def _choose_engine(spec: RunSpec, given: Task | None, task: Task, train: SampleSet) -> tuple[RunSpec, str]:
    """The engine that was asked for, or the best that can start; inside a launcher, its ranks."""
    if given is not None and not spec.task:
        spec = dataclasses.replace(spec, task=find_name(given) or "")
    reason = ""
    name = spec.engine
    if name is None:
        if spec.sim:
            name, reason = "sim", " (because of --sim)"
        elif inside_torchrun():
            name, reason = "torch", " (started by torchrun)"
        elif inside_mpi():
            name, reason = "mpi", " (started by mpiexec)"
        elif _is_compiled(spec, task, train):
            name, reason = "threads", " (compiled workers)"
        elif why := mpi.available():
            name, reason = "threads", f" ({why})"
        elif not spec.task:
            name, reason = "threads", " (the task has no name that fresh processes could find)"
        else:
            name, reason = "mpi", " (default)"
        spec = dataclasses.replace(spec, engine=name)
    elif name == "threads" and _is_compiled(spec, task, train):
        reason = " (compiled workers)"
    name = name.partition(":")[0]
    engine[name]  # refuses an unknown one, with the nearest name
    if spec.workers is None and name in ("mpi", "torch"):
        ranks, servers = launched_size() or mpi.slots(spec.hosts), spec.make_strategy().server_ranks()
        if ranks and ranks <= servers:
            raise UserError(
                f"{ranks} ranks leave no worker beside {servers} servers; start {servers + 1} ranks or more"
            )
        spec = dataclasses.replace(spec, workers=ranks - servers if ranks else None)
    return spec, reason


def _is_compiled(spec: RunSpec, task: Task, train: SampleSet) -> bool:
    if "shared-memory" not in spec.make_strategy().needs:
        return False
    from hocket.drivers.compiled import kernel_for  # Numba takes half a second to import

    return kernel_for(spec, task, train) is not None


def _middle(times: Sequence[dict[str, float]]) -> dict[str, float | None]:
    """For each part of the initial loss, when the workers were there: the median, None if fewer than half were."""
    found: dict[str, float | None] = {}
    for part in (f"{p:g}" for p in PARTS):
        reached = sorted(t.get(part, math.inf) for t in times)
        middle = reached[(len(reached) - 1) // 2]
        found[part] = middle if math.isfinite(middle) else None
    return found


class Recorder(Listener):
    """Hears the ranks, keeps the folder and the display up to date, and makes the Result."""

    def __init__(self, spec: RunSpec, task: Task, folder: RunFolder | None, display: Display) -> None:
        self._spec, self._task, self._folder, self._display = spec, task, folder, display
        self._curve: list[dict[str, Any]] = []
        self._statuses: Sequence[Status] = []
        self._model = b""

    def begin(self, title: str, steps: int) -> None:
        self._display.begin(title, steps)

    def record(self, run: Callable[[], list[dict[str, Any]]]) -> Result:
        try:
            result = self._finished(run())
        except KeyboardInterrupt:
            self._close(self._cut_off("interrupted", "interrupted by the user"))
            raise
        except RankFailed as failure:
            self.failed(failure)
            raise
        except BaseException:
            self._close(self._cut_off("crashed", tb.format_exc()))
            raise
        self._close(result.to_json())
        return result

    def hear(self, rank: int, kind: str, data: dict[str, Any], blob: bytes) -> None:
        match kind:
            case "events" if self._folder:
                for event in data["events"]:
                    self._folder.event(rank, event)
            case "point":
                self._curve.append(data)
                self._display.metric(self._task.metric_name, data[self._metric_key()], data["train_loss"])
                if self._folder:
                    self._folder.point(data)
            case "note":
                self._display.note(data["line"])
            case "model":
                self._model = blob
                if self._folder:
                    self._folder.model(blob)

    def output(self, line: str) -> None:
        self._display.note(line)

    def tick(self, statuses: Sequence[Status]) -> None:
        self._statuses = statuses[: self._spec.workers]  # servers have no progress of their own
        self._display.update(self._statuses)

    def failed(self, failure: RankFailed) -> None:
        self._close(self._cut_off("crashed", f"{failure}\n{failure.traceback}".rstrip()))

    def _metric_key(self) -> str:
        return f"test_{self._task.metric_name}"

    def _close(self, record: dict[str, Any]) -> None:
        self._display.end()
        if self._folder:
            self._folder.finish(record)

    def _finished(self, everyone: list[dict[str, Any]]) -> Result:
        assert self._spec.workers
        reports, servers = everyone[: self._spec.workers], everyone[self._spec.workers :]
        first = reports[0]
        histogram: Counter[int] = Counter()
        for report in servers or reports:  # where there are servers, updates happen there
            histogram.update({int(k): v for k, v in report["staleness"].items()})
        if self._folder and (dropped := sum(r["dropped_events"] for r in everyone)):
            self._folder.event(-1, {"event": "not-logged", "count": dropped, "why": f"trace={self._spec.trace}"})
        keys = (
            "seconds",
            "compute",
            "communication",
            "waiting",
            "bytes_sent",
            "messages",
            "steps",
            "samples",
            "own_metric",
        )
        simulated = self._spec.make_engine().name == "sim"
        return Result(
            **self._known(first["curve"]),
            verdict=first["verdict"],
            seconds=first["real_seconds"] if simulated else first["seconds"],
            virtual_seconds=first["seconds"] if simulated else None,
            samples_per_s=sum(r["samples"] for r in reports) / max(first["seconds"], 1e-9),
            steps=first["steps_done"],
            epochs=first["epochs"],
            bytes_sent=sum(r["bytes_sent"] for r in everyone),
            staleness=staleness_summary(histogram),
            per_worker=[{k: r[k] for k in keys if k in r} for r in reports],
            consensus_distance=first["consensus_distance"],
            parameters=first["parameters"],
            time_to_loss=_middle([r["time_to_loss"] for r in reports]),
            shared=first.get("shared"),
            compile_seconds=first.get("compile_seconds"),
            diverged_at_step=min((r["diverged_at_step"] for r in reports if r["diverged_at_step"]), default=None),
            state=self._state(),
        )

    def _cut_off(self, verdict: Verdict, error: str) -> dict[str, Any]:
        """The record of a run that did not end by itself: all is as of the last point of its learning curve."""
        last = self._curve[-1] if self._curve else {"step": 0, "epoch": 0.0, "seconds": 0.0}
        known = self._known(self._curve)
        known[f"test_{known['metric']}"] = known.pop("test_metric")
        return known | {
            "verdict": verdict,
            "error": error,
            "seconds": last["seconds"],
            "steps": last["step"],
            "epochs": last["epoch"],
            "per_worker": [{"steps": s.step, "samples": s.samples} for s in self._statuses],
        }

    def _known(self, curve: list[dict[str, Any]]) -> dict[str, Any]:
        """What is known of a run however it ended."""
        spec, task, key = self._spec, self._task, self._metric_key()
        last = curve[-1] if curve else {}
        target = spec.target if spec.target is not None else task.target
        reached = (
            point["seconds"]
            for point in curve
            if target is not None and point[key] is not None and task.reached(point[key], target)
        )
        return dict(
            task=spec.task or "task",
            strategy=spec.strategy,
            engine=spec.engine,
            workers=spec.workers,
            seed=spec.seed,
            train_loss=last.get("train_loss"),
            test_loss=last.get("test_loss"),
            metric=task.metric_name,
            test_metric=last.get(key),
            target=target,
            time_to_target=next(reached, None),
            curve=curve,
            versions=versions(),
            out=str(self._folder.path) if self._folder else None,
        )

    def _state(self) -> dict[str, Tensor]:
        from safetensors.torch import load

        return load(self._model) if self._model else {}
