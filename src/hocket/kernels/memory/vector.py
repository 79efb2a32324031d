"""A shared parameter vector as Python sees it: its memory, its options, its statistics."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hocket.core.errors import UserError
from hocket.core.sharing import MAX_WORKERS, Sharing, Statistics
from hocket.kernels.memory import locks
from hocket.kernels.memory import updates as shared
from hocket.kernels.memory import words as c
from hocket.kernels.memory.leashed import count_word

Vector = NDArray[np.float32]

_METHODS = {"mutex": c.MUTEX, "rwlock": c.RWLOCK, "hogwild": c.HOGWILD, "leashed": c.LEASHED}
_BACKOFFS = {
    "none": c.BACKOFF_NONE,
    "constant": c.BACKOFF_CONSTANT,
    "exponential": c.BACKOFF_EXPONENTIAL,
    "yield": c.BACKOFF_YIELD,
}
_HANDLINGS = {
    "none": c.NONE,
    "inverse": c.INVERSE,
    "max1": c.MAX1,
    "exponential": c.EXPONENTIAL,
    "tail": c.TAIL,
    "gap": c.GAP,
    "delay-compensated": c.DELAY_COMPENSATED,
}
_FLOATS_A_LINE = 16  # float32 in 64 bytes


class LockBroken(RuntimeError):
    """A lock of the shared vector could not be had before its deadline: a worker died with it, or is stuck."""


class Block:
    """Memory that workers share: threads by this object, processes by the path of its file.

    The file should be unlinked as soon as all processes have mapped it. The memory lives on until the last of them
    ends, and nothing is left behind however they end.
    """

    def __init__(self, memory: mmap.mmap, path: Path | None = None) -> None:
        self.memory = memory
        self.path = path

    @classmethod
    def anonymous(cls, nbytes: int) -> Block:
        """Memory for threads, and for children that are forked."""
        return cls(mmap.mmap(-1, nbytes))

    @classmethod
    def create(cls, nbytes: int) -> Block:
        """Memory for processes that `attach` to its path."""
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        descriptor, name = tempfile.mkstemp(prefix="hocket-", dir=folder)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)  # a full disk shows here, not as a crash in a worker
            return cls(mmap.mmap(descriptor, nbytes), Path(name))
        except OSError as error:
            os.unlink(name)
            raise UserError(f"no room for {nbytes} bytes of shared memory in {Path(name).parent}: {error}") from error
        finally:
            os.close(descriptor)

    @classmethod
    def attach(cls, path: str | Path) -> Block:
        """The block that another process created."""
        with open(path, "r+b") as file:
            return cls(mmap.mmap(file.fileno(), 0))

    def unlink(self) -> None:
        """Take the file's name away; what is mapped stays."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            self.path = None


class SharedVector:
    """One parameter vector in a block. Compiled workers use `control` and `rows`; others use the methods here.

    A worker is a number below `workers`, used by one thread at a time.
    """

    def __init__(self, block: Block, sharing: Sharing) -> None:
        self.block, self.sharing = block, sharing
        self.control = np.frombuffer(block.memory, np.int64, _words(sharing))
        rows = np.frombuffer(block.memory, np.float32, sharing.rows * _stride(sharing), 8 * _words(sharing))
        self.rows = rows.reshape(sharing.rows, _stride(sharing))

    @classmethod
    def create(cls, block: Block, sharing: Sharing) -> SharedVector:
        """A new vector of zeros in a new block, before any worker starts."""
        if sys.platform != "linux":
            raise UserError(
                f"{sharing.method} needs Linux: locks with a deadline that survive their holder are there only"
            )
        assert sharing.workers <= MAX_WORKERS <= c.SLOT_MASK // 2
        vector = cls(block, sharing)
        vector.control[c.METHOD] = _METHODS[sharing.method]
        vector.control[c.WORKERS] = sharing.workers
        vector.control[c.SLOTS] = sharing.slots
        vector.control[c.PERSISTENCE] = -1 if sharing.persistence is None else sharing.persistence
        vector.control[c.BACKOFF] = _BACKOFFS[sharing.backoff]
        vector.control[c.BACKOFF_NS] = int(sharing.backoff_s * 1e9)
        vector.control[c.BACKOFF_MAX_NS] = int(sharing.backoff_max_s * 1e9)
        vector.control[c.HANDLING] = _HANDLINGS[sharing.handling]
        vector.control[c.EVERY] = sharing.every
        vector.control[c.DEADLINE_NS] = int(sharing.deadline_s * 1e9)
        for w in range(sharing.workers):
            vector.control[c.WORKER_AREA + w * c.WORKER_WORDS + c.RANDOM] = w + 1
        locks.create(vector.control)
        return vector

    @property
    def version(self) -> int:
        """Updates applied so far."""
        return int(shared.version(self.control))

    def set(self, x: Vector) -> None:
        """Start from x, before any worker starts."""
        self._current()[:] = x

    def read(self, worker: int, out: Vector) -> int:
        """Copy the parameters that the worker's next gradient is computed at; returns their version."""
        version = int(shared.read_into(self.control, self.rows, worker, out, self.sharing.dim))
        if version == c.NO_ROW:
            raise LockBroken(self._complaint(worker))
        return version

    def publish(self, worker: int, g: Vector, lr: float = 1.0) -> bool:
        """Apply x -= lr * g, tempered by its staleness since the worker's last `read`; False if it was dropped."""
        read_row = self.sharing.slots + worker if self.sharing.copies else c.NO_ROW
        status = shared.publish(self.control, self.rows, worker, read_row, g, lr, self.sharing.dim)
        if status == c.BROKEN:
            raise LockBroken(self._complaint(worker))
        return bool(status == c.APPLIED)

    def snapshot(self, out: Vector) -> int:
        """Copy the parameters without being a worker (one thread at a time); returns their version."""
        observer = self.sharing.workers
        row = shared.open_read(self.control, observer)
        if row == c.NO_ROW:
            raise LockBroken(self._complaint(observer))
        out[:] = self.rows[row, : self.sharing.dim]
        shared.close_read(self.control, observer, row)
        return int(self._worker(observer)[c.READ_VERSION])

    def stop(self) -> None:
        """Ask all workers to end."""
        self.control[c.STOP] = 1

    def references(self) -> list[int]:
        """The reference count of each slot: all 0 when nobody reads or writes."""
        return [int(self.control[count_word(self.control, slot)]) for slot in range(self.sharing.slots)]

    def statistics(self) -> Statistics:
        """What happened so far."""
        words = np.sum([self._worker(w) for w in range(self.sharing.workers)], axis=0)
        peak_slots = max(int(self._worker(w)[c.PEAK]) for w in range(self.sharing.workers))
        return Statistics(
            updates=int(words[c.UPDATES]),
            dropped=int(words[c.DROPS]),
            staleness=_histogram(words[c.STALENESS : c.STALENESS + c.STALENESS_BINS]),
            tries=_histogram(words[c.TRIES : c.TRIES + c.TRIES_BINS]),
            lock_wait_s=float(words[c.WAIT_NS]) / 1e9,
            peak_vectors=self.sharing.vectors - self.sharing.slots + max(peak_slots, 1),
            recovered=int(self.control[c.RECOVERED]),
            broken=int(words[c.BREAKS]),
        )

    def _worker(self, w: int) -> NDArray[np.int64]:
        first = c.WORKER_AREA + w * c.WORKER_WORDS
        return self.control[first : first + c.WORKER_WORDS]

    def _current(self) -> Vector:
        return self.rows[int(self.control[c.HEAD]) & c.SLOT_MASK, : self.sharing.dim]

    def _complaint(self, worker: int) -> str:
        who = "the observer" if worker == self.sharing.workers else f"worker {worker}"
        return (
            f"{who} waited {self.sharing.deadline_s:g} s for the {self.sharing.method} of the shared vector in vain: "
            "a worker died with it or is stuck"
        )


def nbytes(sharing: Sharing) -> int:
    """Of the whole block."""
    return 8 * _words(sharing) + 4 * sharing.rows * _stride(sharing)


def _words(sharing: Sharing) -> int:
    """Control words."""
    return c.WORKER_AREA + (sharing.workers + 1) * c.WORKER_WORDS + sharing.slots * c.LINE


def _stride(sharing: Sharing) -> int:
    """Floats from one row to the next."""
    return -(-sharing.dim // _FLOATS_A_LINE) * _FLOATS_A_LINE


def _histogram(bins: NDArray[np.int64]) -> Counter[int]:
    return Counter({value: int(count) for value, count in enumerate(bins) if count})
