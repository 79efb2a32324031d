"""Writing so that neither a reader nor a kill nor a full disk ever meets half a file."""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO

PART = ".part"
"""What the name of a file ends in while it is being written."""
LONGEST_LINE = 2**20
"""Bytes of a line of a log, at most."""


def write(path: Path, content: bytes) -> None:
    """Write in one piece: after a kill at any moment there is the old file or the new one, and it is on the disk."""
    part = path.with_name(path.name + PART)
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink()  # so that a full disk has the room again
        raise
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Make the names in a folder last; some file systems cannot."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Log:
    """A file that grows by whole lines; half a line that a kill left at its end is cut off.

    On a full disk it gives up to `spare` bytes of its end back, for what matters more.
    """

    def __init__(self, path: Path, spare: int = 0) -> None:
        self._file = path.open("ab+", buffering=0)
        self._spare = spare
        self._size = 0
        self._cut(self._file.seek(0, os.SEEK_END))

    def add(self, lines: str) -> None:
        rest = memoryview(lines.encode())
        size = self._size + len(rest)
        try:
            while rest:  # where only a part fits, the next write says why
                rest = rest[self._file.write(rest) :]
        except OSError:
            with suppress(OSError):
                self._cut(self._size - min(self._spare, self._size // 2))
            raise
        self._size = size

    def _cut(self, size: int) -> None:
        """Keep the whole lines among the first `size` bytes."""
        begin = self._file.seek(max(0, size - LONGEST_LINE))
        self._size = begin + self._file.read(size - begin).rfind(b"\n") + 1
        self._file.truncate(self._size)

    def close(self) -> None:
        self._file.close()


def hold(path: Path) -> IO[str] | None:
    """The lock that a file is, held until it is closed or this process ends; None while another run holds it."""
    while True:
        lock = path.open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return None
        except OSError:  # some network file systems have no locks
            return lock
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                return lock
        lock.close()  # whoever held it has just ended and removed the file


def room(path: Path) -> str:
    """The disk that a path is on, and what is free there."""
    place = path.resolve()
    while not place.is_mount() and place != place.parent:
        place = place.parent
    return f"the disk at {place} has {shutil.disk_usage(place).free / 1e6:,.1f} MB free"
