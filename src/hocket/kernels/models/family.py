"""What the compiled loops of all families of models have in common: their log, how they end, and how they are run."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple

import numba
import numpy as np
from torch import Tensor

from hocket.kernels.arrays import Floats, Integers
from hocket.kernels.jit import kernel
from hocket.kernels.memory import atomics
from hocket.kernels.memory.gather import CompiledVector, Near, keep_up
from hocket.kernels.memory.updates import next_batch, stopped
from hocket.kernels.memory.vector import MappedVector
from hocket.kernels.memory.words import EVERY, STOP, WORKERS

# How a worker's epoch ended: no batch was left, it was told to stop, a lock broke, the loss was not finite
DONE, STOPPED, BROKEN_LOCK, DIVERGED = range(4)

FASTMATH = {"reassoc", "contract", "nsz"}
"""Sums may be reordered, which lets them use vector registers; NaN and infinity keep their meaning."""


class Log(NamedTuple):
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
def note(log: Log, at: int, loss: float, samples: int) -> None:
    """Log one batch."""
    log.loss[at] = loss
    log.samples[at] = samples
    log.clock_ns[at] = atomics.monotonic_ns()


@kernel
def take_batch(shared: CompiledVector, near: Near, dim: int, made: int, batch: int, samples: int, lr: float) -> int:
    """Where a worker's next batch begins, after the `made` that it took; below 0 it is ~ how the epoch ended."""
    # Who is told to stop takes no batch, and who took one trains on it: none is lost.
    begin = samples if stopped(shared.control) else next_batch(shared.control) * batch
    over = begin >= samples
    if not keep_up(shared, near, dim, made, over, lr):
        return ~BROKEN_LOCK
    if over:
        return ~STOPPED if stopped(shared.control) else ~DONE
    return begin


@kernel
def portion(shared: CompiledVector, n: int, batch: int) -> float:
    """What the gradient of n samples counts; one worker alone steps as a serial run does (see `Worker.portion`)."""
    return 1.0 if shared.control[WORKERS] == 1 else n / batch


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


class KernelWorker:
    """One worker of a kernel: its workspace and its log. Used by one thread at a time."""

    loop: ClassVar[Any]
    """The compiled loop: given the shared vector and the near one, the kernel's data, the workspace, the order of the
    samples, how many are a batch, the rate and the log, it tells how many batches it took, and how it ended."""

    falls: ClassVar[bool] = False
    """Whether the loop can let the rate fall from batch to batch, so that nobody has to meet for that."""

    def __init__(self, kernel: Kernel, batch: int, work: NamedTuple) -> None:
        self.batch = batch
        self._kernel, self._work = kernel, work
        self._copy: Near | None = None
        self.log = Log.empty(0)
        """Of the last epoch."""

    def fall(self, each: float) -> None:
        """Let the rate fall by so much with every batch of an epoch: `lr` is then the first one's."""
        raise AssertionError("this loop holds its rate")

    def kept(self) -> dict[str, Tensor]:
        """What the worker keeps from one epoch to the next, by name, as it lies in its memory."""
        return {}

    def run_epoch(self, shared: MappedVector, order: Integers, lr: float) -> int:
        """Take batches of `order` until none is left; says how it ended.

        The counter of batches, control[NEXT], must be 0 before the first worker of an epoch begins. Who shares by rows
        calls `shared.hand_out(0)` then.
        """
        if self._copy is None and shared.control[EVERY] > 1:
            self._copy = Near.copy(self._kernel.dim)
        log = Log.empty(-(-len(order) // self.batch))
        spread_out(shared.worker, int(shared.control[WORKERS]))
        vector = CompiledVector(shared.control, shared.rows, shared.worker)
        taken, end = self.loop(*self._given(vector, order, lr, log))
        self.log = log.first(taken)
        return int(end)

    def compile(self) -> None:
        """Compile the loop, or load it from the cache, without running it."""
        vector = CompiledVector(np.zeros(1, np.int64), np.zeros((1, 1), np.float32), 0)
        given = self._given(vector, np.zeros(0, np.int64), 0.1, Log.empty(0))
        self.loop.compile(tuple(numba.typeof(value) for value in given))

    def _given(self, shared: CompiledVector, order: Integers, lr: float, log: Log) -> tuple[Any, ...]:
        """What the loop takes."""
        near = Near.itself(shared) if self._copy is None else self._copy
        return shared, near, self._kernel.data, self._work, order, self.batch, float(lr), log


class Kernel(ABC):
    """A model, its loss and its training data, compiled."""

    dim: int
    """The number of parameters, laid out in the order of the module's parameters."""
    samples: int
    data: NamedTuple
    """What its loop computes with, and does not change."""
    touches_all: ClassVar[bool] = False
    by_rows: ClassVar[bool] = False
    """Whether its workers can tell each other what each row adds, and so share nothing that all write."""

    @abstractmethod
    def worker(self, index: int, batch: int, momentum: float = 0.0) -> KernelWorker:
        """A worker's state, for the whole run. Workers with another number draw other random numbers."""

    def hot(self, share: float) -> list[slice]:
        """Where the rows lie that change most often, if it is known: that share of them."""
        return []

    def compile(self) -> None:
        """Compile what a run needs, so that its time can be shown and left out."""
        self.worker(0, 1).compile()

    def running(self) -> AbstractContextManager[Any]:
        """To be held while workers run."""
        return nullcontext()
