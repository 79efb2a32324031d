"""The public Python names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hocket.app.display import choose
from hocket.app.options import takes_keywords
from hocket.core.comm import Comm
from hocket.core.errors import CommError, DeadlineExceeded, RankFailed, UserError
from hocket.core.message import Message
from hocket.core.registry import convert
from hocket.drivers.joining import join
from hocket.drivers.team import Team
from hocket.lab.compare import plan as plan_comparison
from hocket.lab.tune import BUDGET
from hocket.lab.tune import plan as plan_tuning
from hocket.measure.result import Result
from hocket.report.frame import load_runs, plot
from hocket.run import loading
from hocket.run.loading import StopLoading
from hocket.run.resume import resume as resume_run
from hocket.run.spec import RunSpec
from hocket.run.train import train
from hocket.tasks import Task
from hocket.version import __version__

__all__ = [
    "Comm", "CommError", "DeadlineExceeded", "Message", "RankFailed", "Result", "RunSpec", "Task", "Team",
    "UserError", "__version__", "compare", "fit", "join", "load_runs", "plot", "resume", "tune",
]  # fmt: skip


T = TypeVar("T")


@takes_keywords("train")
def fit(
    task: str | Task,
    *,
    out: str | Path | None = None,
    force: bool = False,
    progress: bool = True,
    **settings: Any,
) -> Result:
    """Train `task` and return what came of it.

    `task` is a name (`hocket list`), `path/to/file.py:task`, or a `Task`. `out` is a folder for the record of the
    run, and `force` replaces the one that is there; without `out` nothing is written.
    """
    spec, own = _spec(task, settings)
    return train(spec, own, out=Path(out) if out else None, force=force, display=choose(quiet=not progress))


@takes_keywords("compare")
def compare(
    task: str | Task,
    strategies: str | Sequence[str],
    *,
    workers: int | Sequence[int] = 2,
    seeds: int = 3,
    tune: str | Sequence[str] = (),
    budget: float = BUDGET,
    out: str | Path | None = None,
    force: bool = False,
    progress: bool = True,
    **settings: Any,
) -> dict[str, Any]:
    """Train `task` under several strategies, in turns, and return what compare.json holds.

    `tune` names what each strategy is tuned in before (`["lr"]`, `["lr=0.01..1", "every"]`), and `budget` is what that
    may cost it, in trainings of full length. Without `out` nothing is written.
    """
    spec, own = _spec(task, settings)
    comparison = plan_comparison(
        spec,
        _several(strategies, str, "strategies"),
        _several(workers, int, "workers"),
        convert(seeds, int, "seeds"),
        _several(tune, str, "tune"),
        convert(budget, float, "budget"),
        own,
    )
    display = choose(quiet=not progress)
    for warning in comparison.warnings():
        display.note(warning)
    return comparison.run(Path(out) if out else None, force, display)


@takes_keywords("tune")
def tune(
    task: str | Task,
    tune: str | Sequence[str] = ("lr",),
    *,
    budget: float = BUDGET,
    out: str | Path | None = None,
    force: bool = False,
    progress: bool = True,
    **settings: Any,
) -> dict[str, Any]:
    """Find the settings that suit a strategy best, and return what tune.json holds; `best` has their values.

    `tune` names what is tuned: `lr`, `lr=0.01..1`, `every=4,8`. `budget` is what that may cost, in trainings of full
    length. Without `out` nothing is written.
    """
    spec, own = _spec(task, settings)
    tuning = plan_tuning(spec, _several(tune, str, "tune"), convert(budget, float, "budget"), own)
    return tuning.run(Path(out) if out else None, force, choose(quiet=not progress))


def _several(given: Any, kind: type[T], what: str) -> list[T]:
    """What may be given alone or as a sequence, each of that kind."""
    several = isinstance(given, Iterable) and not isinstance(given, str)
    return [convert(one, kind, what) for one in (given if several else [given])]


def _spec(task: str | Task, settings: dict[str, Any]) -> tuple[RunSpec, Task | None]:
    """The settings of a run, and the user's own object, if the task is one."""
    if loading.loading:
        raise StopLoading
    name, own = (task, None) if isinstance(task, str) else ("", _task(task))
    return RunSpec.from_mapping({"task": name, **settings}), own


def _task(task: Any) -> Task:
    if not isinstance(task, Task):
        what = "a class" if isinstance(task, type) else f"a {type(task).__name__}"
        raise UserError(f"task must be a hocket.Task, or text such as 'digits' or 'path/to/file.py:task'; got {what}")
    return task


@takes_keywords("train")
def resume(run: str | Path, *, task: Task | None = None, progress: bool = True, **settings: Any) -> Result:
    """Go on with the run in the folder `run` from its newest checkpoint, with some of `fit`'s settings changed.

    `task` is for a `Task` that has no name by which it could be found again.
    """
    if loading.loading:
        raise StopLoading
    return resume_run(Path(run), settings, choose(quiet=not progress), None if task is None else _task(task))
