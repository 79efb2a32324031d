"""What the compiled loops of all families of models have in common: their log, how they end, and how they are run."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numba
import numpy as np

from hocket.kernels.jit import kernel
from hocket.kernels.memory import atomics
from hocket.kernels.memory.gather import Copy, View, keep_up
from hocket.kernels.memory.updates import next_batch, stopped
from hocket.kernels.memory.words import EVERY, STOP, WORKERS

Floats = np.ndarray[Any, np.dtype[np.float32]]
Integers = np.ndarray[Any, np.dtype[np.int64]]
Columns = np.ndarray[Any, np.dtype[np.int32]]

# How a worker's epoch ended: no batch was left, it was told to stop, a lock broke, the loss was not finite
DONE, STOPPED, BROKEN_LOCK, DIVERGED = range(4)

FASTMATH = {"reassoc", "contract", "nsz"}
"""Sums may be reordered, which lets them use vector registers; NaN and infinity keep their meaning."""


class Memory(Protocol):
    """The part of a SharedVector that compiled loops work on."""

    @property
    def control(self) -> Integers: ...

    @property
    def rows(self) -> Floats: ...


@dataclass(frozen=True)
class Log:
    """One entry a batch: its mean loss, how many samples it had, and the monotonic clock after it."""

    loss: Floats
    samples: Integers
    clock_ns: Integers

    @classmethod
    def empty(cls, capacity: int) -> Log:
        return cls(np.zeros(capacity, np.float32), np.zeros(capacity, np.int64), np.zeros(capacity, np.int64))

    def first(self, n: int) -> Log:
        return Log(self.loss[:n], self.samples[:n], self.clock_ns[:n])


@kernel
def note(log_loss: Floats, log_samples: Integers, log_clock: Integers, at: int, loss: float, samples: int) -> None:
    """Log one batch."""
    log_loss[at] = loss
    log_samples[at] = samples
    log_clock[at] = atomics.monotonic_ns()


@kernel
def take_batch(
    shared: View, near: View, start: Floats, gained: Floats, dim: int, made: int, batch: int, samples: int, lr: float
) -> int:
    """Where a worker's next batch begins, after the `made` that it took; below 0 it is ~ how the epoch ended."""
    begin = next_batch(shared.control) * batch
    over = begin >= samples or stopped(shared.control)
    if not keep_up(shared, near, start, gained, dim, made, over, lr):
        return ~BROKEN_LOCK
    if over:
        return ~STOPPED if stopped(shared.control) else ~DONE
    return begin


@kernel
def stop_all(control: Integers) -> None:
    """Tell every worker to end."""
    atomics.store(control, STOP, 1)


def spread_out(worker: int, workers: int) -> None:
    """Begin on a core of one's own, where there are enough; from there the system may move the thread as it likes.

    Threads that wake up together may find themselves on one core, and stay there for some milliseconds: as long as a
    whole epoch of a small set, which one of them then trains alone.
    """
    cores = sorted(os.sched_getaffinity(0))
    if 1 < workers <= len(cores):
        os.sched_setaffinity(0, {cores[worker]})
        os.sched_setaffinity(0, cores)


class KernelWorker(ABC):
    """One worker of a kernel: its workspace and its log. Used by one thread at a time."""

    loop: ClassVar[Any]
    """The compiled loop."""

    def __init__(self, index: int, batch: int, dim: int) -> None:
        self.index, self.batch, self._dim = index, batch, dim
        self._copy: Copy | None = None
        self.log = Log.empty(0)
        """Of the last epoch."""

    @abstractmethod
    def arguments(self, order: Integers, lr: float) -> tuple[Any, ...]:
        """What the loop takes between the vectors and the log."""

    def run_epoch(self, shared: Memory, order: Integers, lr: float) -> int:
        """Take batches of `order` until none is left; says how it ended.

        The counter of batches, control[NEXT], must be 0 before the first worker of an epoch begins.
        """
        if self._copy is None and shared.control[EVERY] > 1:
            self._copy = Copy(self._dim)
        log = Log.empty(-(-len(order) // self.batch))
        spread_out(self.index, int(shared.control[WORKERS]))
        taken, end = self.loop(*self._given(shared.control, shared.rows, order, lr, log))
        self.log = log.first(taken)
        return int(end)

    def compile(self) -> None:
        """Compile the loop, or load it from the cache, without running it."""
        control, rows = np.zeros(1, np.int64), np.zeros((1, 1), np.float32)
        given = self._given(control, rows, np.zeros(0, np.int64), 0.1, Log.empty(0))
        self.loop.compile(tuple(numba.typeof(value) for value in given))

    def _given(self, control: Integers, rows: Floats, order: Integers, lr: float, log: Log) -> tuple[Any, ...]:
        """What the loop takes."""
        shared, none = View(control, rows, self.index), np.zeros(0, np.float32)
        near = (shared, none, none) if self._copy is None else (self._copy.view, self._copy.start, self._copy.gained)
        return shared, *near, *self.arguments(order, lr), log.loss, log.samples, log.clock_ns


class Kernel(ABC):
    """A model, its loss and its training data, compiled."""

    dim: int
    """The number of parameters, laid out in the order of the module's parameters."""
    samples: int
    takes_momentum: ClassVar[bool] = False

    @abstractmethod
    def worker(self, index: int, batch: int, momentum: float = 0.0) -> KernelWorker:
        """A worker's state, for the whole run."""

    def compile(self) -> None:
        """Compile what a run needs, so that its time can be shown and left out."""
        self.worker(0, 1).compile()

    def running(self) -> AbstractContextManager[Any]:
        """To be held while workers run."""
        return nullcontext()
