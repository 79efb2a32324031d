"""Memory that several workers see."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from hocket.core.errors import UserError

_SHARE = 4
"""A block that can be smaller takes this part of what is free: a container has 64 MB, and a run several blocks."""


def place() -> str:
    """Where files are that processes map: in memory, if there is such a place."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


def free() -> int:
    """Bytes that are free there."""
    found = os.statvfs(place())
    return found.f_bavail * found.f_frsize


def room() -> int:
    """Bytes that a block may take which can be smaller."""
    return free() // _SHARE


def _most() -> int:
    """Bytes that a block in no folder may have: half of the machine's memory, as Linux gives /dev/shm."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


class Block:
    """Memory that workers share: threads by this object, processes by the path of its file.

    The file should be unlinked as soon as all processes have mapped it. The memory lives on until the last of them
    ends, and nothing is left behind however they end.
    """

    def __init__(self, memory: mmap.mmap, path: Path | None = None, descriptor: int = -1) -> None:
        self.memory = memory
        self.path = path
        self._descriptor = descriptor
        """Of memory whose file has no name of its own: while it is open, `path` leads to it."""

    @classmethod
    def anonymous(cls, nbytes: int) -> Block:
        """Memory for threads, and for children that are forked."""
        return cls(mmap.mmap(-1, nbytes))

    @classmethod
    def create(cls, nbytes: int) -> Block:
        """Memory for processes that `attach` to its path."""
        try:
            return cls._in(place(), nbytes)
        except OSError as error:
            with suppress(OSError):
                return cls._nowhere(nbytes)
            raise UserError(
                f"no room for {nbytes / 1e6:.1f} MB of shared memory in {place()}: {error.strerror}; free "
                f"some, give a container more (docker run --shm-size), or use fewer ranks"
            ) from error

    @classmethod
    def _in(cls, folder: str, nbytes: int) -> Block:
        descriptor, name = tempfile.mkstemp(prefix="hocket-", dir=folder)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)  # a full disk shows here, not as a crash in a worker
            return cls(mmap.mmap(descriptor, nbytes), Path(name))
        except OSError:
            os.unlink(name)
            raise
        finally:
            os.close(descriptor)

    @classmethod
    def _nowhere(cls, nbytes: int) -> Block:
        """In memory that is in no folder, whose size so does not matter: found by way of this process."""
        if sys.platform != "linux" or nbytes > _most():
            raise OSError("no such memory")
        descriptor = os.memfd_create("hocket")
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            return cls(mmap.mmap(descriptor, nbytes), Path(f"/proc/{os.getpid()}/fd/{descriptor}"), descriptor)
        except OSError:
            os.close(descriptor)
            raise

    @classmethod
    def attach(cls, path: str | Path) -> Block:
        """The block that another process created."""
        with open(path, "r+b") as file:
            return cls(mmap.mmap(file.fileno(), 0))

    def unlink(self) -> None:
        """Take the file's name away; what is mapped stays."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        elif self.path is not None:
            self.path.unlink(missing_ok=True)
        self.path, self._descriptor = None, -1
