"""Whose mistake it was: errors out of the user's own functions, shown by the user's lines and one of ours."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from hocket.core.errors import RankFailed, UserError, named
from hocket.core.frames import users_frames


class TaskError(UserError):
    """A function of the user's task raised, or gave what it must not. `frames` are the user's lines that led there."""

    def __init__(self, message: str, frames: str = "") -> None:
        super().__init__(message)
        self.frames = frames


class NothingTrained(RankFailed):
    """A rank failed before the first step was taken."""

    @classmethod
    def of(cls, failure: RankFailed) -> NothingTrained:
        return cls(failure.rank, failure.operation, failure.reason, failure.traceback)


@contextmanager
def blaming(what: str) -> Iterator[None]:
    """Turn what the user's function `what` raises into one line about it."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        frames = users_frames("".join(traceback.format_tb(error.__traceback__)))
        raise TaskError(f"{what} raised {one_line(error)}", frames) from error


def one_line(error: BaseException) -> str:
    """An error as `Kind: what it says`, on one line of bearable length."""
    text = " ".join(named(error).split())
    return text if len(text) <= 300 else f"{text[:300]} ..."
