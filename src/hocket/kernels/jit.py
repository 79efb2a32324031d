"""How kernels are compiled: without the GIL, once, and again only when some kernel has changed."""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache

_FOLDER = Path(__file__).parent


def _sources() -> list[Path]:
    """All whose functions or constants are compiled."""
    core = _FOLDER.parent / "core"
    return [*sorted(_FOLDER.rglob("*.py")), core / "staleness.py", core / "sharing.py"]


def _fingerprint(files: Iterable[Path]) -> str:
    """Of the text of all kernels, as Numba's own check sees only the file of the function that it caches.

    The code of the kernels that a function calls is part of what is cached, so a change in one file would else leave
    the old code in use in others.
    """
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def _places() -> Iterator[Path]:
    """Where compiled kernels may be kept, best first."""
    if numba.config.CACHE_DIR:
        yield Path(numba.config.CACHE_DIR)
    yield _FOLDER / "__pycache__"
    users = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(users):  # where there is no home it still begins with ~
        yield Path(users, "hocket", "kernels")
    yield Path(tempfile.gettempdir(), f"hocket-kernels-{os.geteuid()}")


def _is_private(folder: Path) -> bool:
    """Whether this user can write the folder, and nobody else can write or replace it; it is made if it is not there.

    What is in the cache will be run, so no one else may ever put anything there.
    """
    try:
        for part in reversed([folder, *folder.parents]):
            part.mkdir(mode=0o700, exist_ok=True)
        above = [parent.stat() for parent in folder.resolve().parents]
        own = folder.lstat()
    except OSError:
        return False
    me, others_write = os.geteuid(), stat.S_IWGRP | stat.S_IWOTH
    if not stat.S_ISDIR(own.st_mode) or own.st_uid != me or own.st_mode & others_write:
        return False
    if not os.access(folder, os.W_OK | os.X_OK):
        return False
    # In a sticky folder, as /tmp is, each may change only what is theirs
    return all(
        parent.st_uid in (0, me) and (parent.st_mode & stat.S_ISVTX or not parent.st_mode & others_write)
        for parent in above
    )


def _cache_folder(places: Iterable[Path], is_private: Callable[[Path], bool] = _is_private) -> str:
    """The folder for the kernels as they are; empty where there is none, and each process has to compile them."""
    name = f"kernels-{_fingerprint(_sources())}"
    return next((str(place / name) for place in places if is_private(place / name)), "")


_CACHE_FOLDER = _cache_folder(_places())


@contextmanager
def one_compiles() -> Iterator[None]:
    """Of processes that come here together, one is inside at a time: the first compiles, and the others find that."""
    if not _CACHE_FOLDER:
        yield
        return
    with _alone("lock"):
        yield


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """Inside, no other process holds the lock of this name."""
    with open(Path(_CACHE_FOLDER) / name, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # some network file systems have no locks
            pass
        yield


class _Cache(FunctionCache):  # type: ignore[misc]  # Numba is not typed
    """Numba's own, for several processes: two that save one function for different types would take one file's name."""

    def save_overload(self, signature: Any, compiled: Any) -> None:
        with _alone("saving"):
            super().save_overload(signature, compiled)


def kernel(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorate a function as `numba.njit` does, with its options; other kernels may call it, and so may Python."""
    if function is None:
        return lambda function: kernel(function, **options)
    users_folder = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = _CACHE_FOLDER
    try:
        # Kernels make no arrays and keep none, so they need not count references: that took a tenth of a sparse loop
        made = numba.njit(nogil=True, _nrt=False, **options)(function)
        if _CACHE_FOLDER:
            made._cache = _Cache(function)
        return made
    finally:
        numba.config.CACHE_DIR = users_folder
