"""The public Python names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hocket.app.display import choose
from hocket.app.options import takes_keywords
from hocket.core.errors import CommError, DeadlineExceeded, RankFailed, UserError
from hocket.drivers.team import Team, join
from hocket.measure.result import Result
from hocket.run import loading
from hocket.run.loading import StopLoading
from hocket.run.resume import resume as resume_run
from hocket.run.spec import RunSpec
from hocket.run.train import train
from hocket.tasks import Task
from hocket.version import __version__

__all__ = [
    "CommError", "DeadlineExceeded", "RankFailed", "Result", "RunSpec", "Task", "Team", "UserError",
    "__version__", "fit", "join", "resume",
]  # fmt: skip


@takes_keywords
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
    if loading.loading:
        raise StopLoading
    name, own = (task, None) if isinstance(task, str) else ("", task)
    spec = RunSpec.from_mapping({"task": name, **settings})
    return train(spec, own, out=Path(out) if out else None, force=force, display=choose(quiet=not progress))


@takes_keywords
def resume(run: str | Path, *, task: Task | None = None, progress: bool = True, **settings: Any) -> Result:
    """Go on with the run in the folder `run` from its newest checkpoint, with some of `fit`'s settings changed.

    `task` is for a `Task` that has no name by which it could be found again.
    """
    if loading.loading:
        raise StopLoading
    return resume_run(Path(run), settings, choose(quiet=not progress), task)
