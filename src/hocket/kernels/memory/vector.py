"""A shared parameter vector in memory that workers map: its block, its options, its statistics, its state."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hocket.core.errors import UserError
from hocket.core.sharing import MAX_WORKERS, Backoff, Method, Sharing, Statistics
from hocket.core.staleness import Handling, needs_the_read, needs_the_squares
from hocket.kernels.memory import locks, updates
from hocket.kernels.memory import words as c
from hocket.kernels.memory.block import Block
from hocket.kernels.memory.leashed import count_word
from hocket.kernels.memory.tempering import squares_row

# Options by their codes in the control words, which have the same order
_METHODS, _BACKOFFS, _HANDLINGS = get_args(Method), get_args(Backoff), get_args(Handling)
# Words of one worker that are saved, beside its histograms and its numbers
_SAVED = {
    "read_version": c.READ_VERSION,
    "updates": c.UPDATES,
    "dropped": c.DROPS,
    "wait_ns": c.WAIT_NS,
    "peak": c.PEAK,
    "breaks": c.BREAKS,
    "random": c.RANDOM,
    "seen": c.SEEN,
}
_SAVED_NUMBERS = {"mean_square": c.MEAN_SQUARE, "largest_lr": c.LARGEST_LR}
_FLOATS_A_LINE = 16  # float32 in 64 bytes


class LockBroken(RuntimeError):
    """A lock of the shared vector could not be had before its deadline: a worker died with it, or is stuck."""


class MappedVector:
    """A parameter vector in a block, as one worker sees it.

    A worker is a number below `sharing.workers`, used by one thread at a time. Compiled workers use `control` and
    `rows`, whose meaning is told in `hocket.kernels.memory.updates`; others use the methods here.
    """

    def __init__(self, block: Block, sharing: Sharing, worker: int) -> None:
        self.sharing, self.worker = sharing, worker
        self._block = block
        self._beside: dict[tuple[str, int], NDArray[Any]] = {}
        self.control = np.frombuffer(block.memory, np.int64, _words(sharing))
        rows = np.frombuffer(block.memory, np.float32, sharing.rows * _stride(sharing), 8 * _words(sharing))
        self.rows = rows.reshape(sharing.rows, _stride(sharing))

    @classmethod
    def create(cls, sharing: Sharing, x: Tensor, block: Block | None = None) -> MappedVector:
        """A new vector that starts from x, as worker 0 sees it, in a new block: before any other worker maps it."""
        if sys.platform != "linux":
            raise UserError(
                f"{sharing.method} needs Linux: locks with a deadline that survive their holder are there only"
            )
        if x.dtype != torch.float32 or x.device.type != "cpu":  # `train` refuses this before; a user's loop may not
            raise UserError(
                f"strategy {sharing.method} shares float32 parameters in main memory; got {x.dtype}, {x.device}"
            )
        assert sharing.workers <= MAX_WORKERS <= c.SLOT_MASK // 2
        vector = cls(block or Block.anonymous(nbytes(sharing)), sharing, 0)
        control = vector.control
        control[c.METHOD] = _METHODS.index(sharing.method)
        control[c.WORKERS] = sharing.workers
        control[c.SLOTS] = sharing.slots
        control[c.PERSISTENCE] = -1 if sharing.persistence is None else sharing.persistence
        control[c.BACKOFF] = _BACKOFFS.index(sharing.backoff)
        control[c.BACKOFF_NS] = int(sharing.backoff_s * 1e9)
        control[c.BACKOFF_MAX_NS] = int(sharing.backoff_max_s * 1e9)
        control[c.HANDLING] = _HANDLINGS.index(sharing.handling)
        control[c.EVERY] = sharing.every
        control[c.DEADLINE_NS] = int(sharing.deadline_s * 1e9)
        for w in range(sharing.workers):
            vector._words_of(w)[c.RANDOM] = w + 1
        locks.create(control)
        vector._current()[:] = x.detach().numpy()
        return vector

    @classmethod
    def around(cls, sharing: Sharing, x: Tensor) -> MappedVector:
        """A vector that lies where it is, for threads of one process that write it in place."""
        assert sharing.method == "hogwild" and not sharing.copies, "others need rows beside it"
        vector = cls.create(replace(sharing, dim=1), x[:1])
        vector.rows = x.detach().numpy()[None]
        return vector

    def seen_by(self, worker: int) -> MappedVector:
        """The same vector, as another worker in this process sees it."""
        seen = MappedVector(self._block, self.sharing, worker)
        seen.rows = self.rows
        seen._beside = self._beside
        return seen

    def hand_out(self, first: int) -> None:
        """Begin a stretch at this batch; to be called while no worker takes batches."""
        self.control[c.NEXT] = self.control[c.FIRST] = first
        self.control[c.STRETCH] += 1
        self.control[c.LEFT] = 0

    def beside(self, name: str, length: int, dtype: type[np.generic]) -> NDArray[Any]:
        """An array that all who see the vector in this process share; at first it is 0."""
        # Of several threads that come here together the first one's is taken by all
        return self._beside.setdefault((name, length), np.zeros(length, dtype))

    @property
    def version(self) -> int:
        """Updates applied so far."""
        return int(updates.version(self.control))

    def read(self, out: Tensor) -> int:
        target = out.detach().numpy()
        version = int(updates.read_into(self.control, self.rows, self.worker, target, self.sharing.dim))
        if version == c.NO_ROW:
            raise LockBroken(self._complaint(f"worker {self.worker}"))
        return version

    def publish(self, g: Tensor, lr: float) -> bool:
        read_row = self.sharing.slots + self.worker if self.sharing.copies else c.NO_ROW
        step = g.detach().numpy()
        status = updates.publish(self.control, self.rows, self.worker, read_row, step, lr, self.sharing.dim)
        if status == c.BROKEN:
            raise LockBroken(self._complaint(f"worker {self.worker}"))
        return bool(status == c.APPLIED)

    def snapshot(self, out: Tensor) -> None:
        observer = self.sharing.workers  # as it were: a look is nobody's read
        row = updates.open_read(self.control, observer)
        if row == c.NO_ROW:
            raise LockBroken(self._complaint("the observer"))
        out.detach().numpy()[:] = self.rows[row, : self.sharing.dim]
        updates.close_read(self.control, observer, row)

    def stop(self) -> None:
        """Ask all workers to end."""
        self.control[c.STOP] = 1

    def references(self) -> list[int]:
        """The reference count of each slot: all 0 when nobody reads or writes."""
        return [int(self.control[count_word(self.control, slot)]) for slot in range(self.sharing.slots)]

    def lock_wait_s(self) -> float:
        return float(self._words_of(self.worker)[c.WAIT_NS]) / 1e9

    def statistics(self) -> Statistics:
        workers = range(self.sharing.workers)
        words = np.sum([self._words_of(w) for w in workers], axis=0)
        peak_slots = max(int(self._words_of(w)[c.PEAK]) for w in workers)
        return Statistics(
            updates=int(words[c.UPDATES]),
            dropped=int(words[c.DROPS]),
            staleness=_counter(words[c.STALENESS : c.TRIES]),
            tries=_counter(words[c.TRIES : c.WORKER_WORDS]),
            lock_wait_s=float(words[c.WAIT_NS]) / 1e9,
            peak_vectors=self.sharing.vectors - self.sharing.slots + max(peak_slots, 1),
            recovered=int(self.control[c.RECOVERED]),
            broken=int(words[c.BREAKS]),
            lost=self._lost(int(words[c.UPDATES])),
        )

    def state(self) -> dict[str, Any]:
        words = self._words_of(self.worker)
        own: dict[str, Any] = {name: int(words[at]) for name, at in _SAVED.items()}
        own |= {name: float(words.view(np.float64)[at]) for name, at in _SAVED_NUMBERS.items()}
        own["staleness"], own["tries"] = _counter(words[c.STALENESS : c.TRIES]), _counter(words[c.TRIES :])
        if needs_the_read(self.sharing.handling):
            own["read"] = torch.from_numpy(self._own_copy().copy())
        if needs_the_squares(self.sharing.handling):
            own["squares"] = torch.from_numpy(self._own_squares().copy())
        if self.worker == 0:
            x = torch.from_numpy(self._current().copy())
            counts = {"recovered": int(self.control[c.RECOVERED]), "canary": int(self.control[c.CANARY])}
            own["common"] = {"x": x, "version": self.version, **counts}
        return own

    def load_state(self, saved: dict[str, Any]) -> None:
        words = self._words_of(self.worker)
        for name, at in _SAVED.items():
            words[at] = saved[name]
        for name, at in _SAVED_NUMBERS.items():
            words.view(np.float64)[at] = saved[name]
        words[c.STALENESS :] = 0
        for first, counts in ((c.STALENESS, saved["staleness"]), (c.TRIES, saved["tries"])):
            for value, count in counts.items():
                words[first + value] = count
        if needs_the_read(self.sharing.handling):
            self._own_copy()[:] = saved["read"].numpy()
        if needs_the_squares(self.sharing.handling):
            self._own_squares()[:] = saved["squares"].numpy()
        if self.worker == 0:
            common = saved["common"]
            self._current()[:] = common["x"].numpy()
            self.control[c.HEAD] = common["version"] << c.SLOT_BITS | self._slot()
            self.control[c.RECOVERED] = common["recovered"]
            self.control[c.CANARY] = common["canary"]

    def _words_of(self, worker: int) -> NDArray[np.int64]:
        first = c.WORKER_AREA + worker * c.WORKER_WORDS
        return self.control[first : first + c.WORKER_WORDS]

    def _lost(self, updates: int) -> float:
        """The share of all updates that the canary missed."""
        if self.control[c.METHOD] != c.HOGWILD or not updates:
            return 0.0
        return 1 - int(self.control[c.CANARY]) / updates

    def _slot(self) -> int:
        return int(self.control[c.HEAD]) & c.SLOT_MASK

    def _current(self) -> NDArray[np.float32]:
        return self.rows[self._slot(), : self.sharing.dim]

    def _own_copy(self) -> NDArray[np.float32]:
        return self.rows[self.sharing.slots + self.worker, : self.sharing.dim]

    def _own_squares(self) -> NDArray[np.float32]:
        return self.rows[squares_row(self.control, self.worker), : self.sharing.dim]

    def _complaint(self, who: str) -> str:
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


def _counter(bins: NDArray[np.int64]) -> Counter[int]:
    return Counter({value: int(count) for value, count in enumerate(bins) if count})
