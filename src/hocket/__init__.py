"""Hocket trains PyTorch models with parallel SGD under many synchronisation schemes, and measures each one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hocket.version import __version__

if TYPE_CHECKING:
    from hocket.app.api import (
        Comm,
        CommError,
        DeadlineExceeded,
        Message,
        RankFailed,
        Result,
        RunSpec,
        Task,
        Team,
        UserError,
        compare,
        fit,
        join,
        load_runs,
        plot,
        resume,
        tune,
    )

__all__ = [
    "Comm", "CommError", "DeadlineExceeded", "Message", "RankFailed", "Result", "RunSpec", "Task", "Team",
    "UserError", "__version__", "compare", "fit", "join", "load_runs", "plot", "resume", "tune",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import the public names on first use: `hocket --help` need not wait for PyTorch."""
    if name not in __all__:
        raise AttributeError(f"module 'hocket' has no attribute {name!r}")
    from hocket.app import api

    return getattr(api, name)
