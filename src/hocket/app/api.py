"""The public Python names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hocket.app.display import choose
from hocket.core.errors import CommError, DeadlineExceeded, RankFailed, UserError
from hocket.drivers.team import Team, join
from hocket.engines.catalogue import DEADLINE_S
from hocket.measure.result import Result
from hocket.measure.trace import DETAIL
from hocket.run import spec as specs
from hocket.run.spec import RunSpec, StopLoading
from hocket.run.train import train
from hocket.tasks import Task
from hocket.version import __version__

__all__ = [
    "CommError", "DeadlineExceeded", "RankFailed", "Result", "RunSpec", "Task", "Team", "UserError",
    "__version__", "fit", "join",
]  # fmt: skip


def fit(
    task: str | Task,
    *,
    strategy: str = "allreduce",
    workers: int | None = None,
    engine: str | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    batch: int | None = None,
    lr: float | None = None,
    momentum: float | None = None,
    optimizer: str | None = None,
    warmup: float = 0.0,
    scale_lr: bool = False,
    lr_decay: float | None = None,
    seed: int = 0,
    target: float | None = None,
    data: str | Path | None = None,
    test_data: str | Path | None = None,
    device: str = "cpu",
    deadline: float = DEADLINE_S,
    trace: int = DETAIL,
    hosts: str = "",
    mpiexec: str = "",
    sim: dict[str, Any] | None = None,
    out: str | Path | None = None,
    force: bool = False,
    progress: bool = True,
) -> Result:
    """Train `task` under `strategy` and return what came of it.

    `task` is a name (`hocket list`), `path/to/file.py:task`, or a `Task`. `out` is a folder for the record
    of the run; without it nothing is written.
    """
    if specs.loading:
        raise StopLoading
    settings = dict(
        strategy=strategy, workers=workers, engine=engine, epochs=epochs, steps=steps, batch=batch, lr=lr,
        momentum=momentum, optimizer=optimizer, warmup=warmup, scale_lr=scale_lr, lr_decay=lr_decay,
        seed=seed, target=target, data=str(data) if data else None,
        test_data=str(test_data) if test_data else None,
        device=device, deadline=deadline, trace=trace, hosts=hosts, mpiexec=mpiexec, sim=sim or {},
    )  # fmt: skip
    name = task if isinstance(task, str) else ""
    spec = RunSpec.from_mapping({"task": name, **settings})
    own = None if isinstance(task, str) else task
    return train(spec, own, out=Path(out) if out else None, force=force, display=choose(quiet=not progress))
