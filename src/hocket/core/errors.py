"""The errors that Hocket raises on purpose."""

from __future__ import annotations


class UserError(ValueError):
    """A user's mistake. The message is one line that says what to do; the command line shows only it."""


def said(error: BaseException) -> str:
    """What an error says. One of the user's own may raise even then."""
    try:
        return str(error)
    except Exception:
        return "its own __str__ raises"


def named(error: BaseException) -> str:
    """An error as `Kind: what it says`, to be sent to who started the run; every user's mistake is a `UserError`."""
    kind = UserError if isinstance(error, UserError) else type(error)
    return f"{kind.__name__}: {said(error)}".removesuffix(": ")


def shown(value: object) -> str:
    """A value as it may stand in such a line: short, and on one line whatever it is."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


class CommError(RuntimeError):
    """A message could not be exchanged with another rank."""


class DeadlineExceeded(CommError, TimeoutError):
    """A wait ran past its deadline. Names the rank that waits, for whom, in which operation, since when."""

    def __init__(self, rank: int, operation: str, peers: str, seconds: float) -> None:
        super().__init__(
            f"rank {rank} waited {seconds:.1f} s in {operation} for {peers}; gave up at the deadline (give it more "
            f"with --deadline SECONDS, or deadline= in Python)"
        )
        self.rank, self.operation, self.peers, self.seconds = rank, operation, peers, seconds


class NothingCame(TimeoutError):
    """A receive found nothing within its time-out, which is no failure."""

    def __init__(self, rank: int, seconds: float | None, operation: str) -> None:
        super().__init__(f"rank {rank}: nothing in {seconds} s in {operation}")


class Aborted(CommError):
    """This rank was told to stop because another rank failed or the user interrupted the run."""


class RankFailed(RuntimeError):
    """A rank raised, died or never arrived; raised where the run was started."""

    def __init__(self, rank: int, operation: str, reason: str, traceback: str = "") -> None:
        super().__init__(f"rank {rank} failed in {operation}: {reason}")
        self.rank, self.operation, self.reason, self.traceback = rank, operation, reason, traceback
