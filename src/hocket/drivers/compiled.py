"""Shared-memory strategies in threads, with the whole worker compiled: no Python, and no GIL, inside an epoch."""

from __future__ import annotations

import time
from typing import Any

import torch

from hocket.core.comm import Comm, Rank
from hocket.core.errors import CommError, UserError
from hocket.drivers.own_loop import Loop
from hocket.kernels.memory.words import NEXT
from hocket.kernels.models.family import BROKEN_LOCK, Kernel
from hocket.measure.losses import Losses
from hocket.run.spec import RunSpec
from hocket.tasks import SampleSet, Task
from hocket.tasks.base import compiled


def kernel_for(spec: RunSpec, task: Task, train: SampleSet) -> Kernel | None:
    """The compiled worker that fits a run, if there is one."""
    if "shared-memory" not in spec.make_strategy().needs or spec.device != "cpu":
        return None
    kernel = compiled(task.build_model(spec.seed), task.loss, train)
    if kernel is None or (spec.optimizer or task.optimizer) != "sgd" or spec.warmup:
        return None
    momentum = task.momentum if spec.momentum is None else spec.momentum
    if momentum and not kernel.takes_momentum:
        raise UserError(
            f"the compiled workers of task {spec.task.partition(':')[0]} change only what a sample touches, and hold "
            "no momentum, which would change everything; use --momentum 0, or --engine mpi"
        )
    return kernel


class CompiledLoop(Loop):
    """The workers run an epoch each by themselves, then meet."""

    def __init__(
        self, rank: Rank, workers: Comm, spec: RunSpec, task: Task, train: SampleSet, test: SampleSet, kernel: Kernel
    ) -> None:
        super().__init__(rank, workers, spec, task, train, test)
        assert spec.batch and spec.momentum is not None
        assert kernel.dim == self._model.x.numel(), "the kernel computes another model"
        self._kernel = kernel
        self._thread = kernel.worker(workers.rank, spec.batch, spec.momentum)
        self._epochs_done = 0

    @property
    def meets(self) -> bool:
        return True

    def run(self) -> dict[str, Any]:
        if self._worker.rank == 0:
            self._rank.status.operation = "compile"
            began = time.perf_counter()
            self._kernel.compile()
            self._compile_s = time.perf_counter() - began
            self._rank.status.operation = "compute"
        self._workers.barrier()
        with self._kernel.running():
            return super().run()

    def _train_epochs(self) -> dict[str, Any]:
        steps, batch = self._shards.steps, self._spec.batch
        assert batch
        left = self._total_steps
        while left > 0:
            self._run_epoch(left * batch * self._worker.size)
            left -= steps
            if left > 0 and self._pulse(final=False):
                break
        return {"consensus_distance": None}

    def _run_epoch(self, samples: int) -> None:
        """Take batches of this epoch, of its first `samples` at most, until none is left."""
        shared: Any = self._worker.shared
        status, clock = self._rank.status, self._rank.clock
        status.stop()
        epoch = self._epochs_done
        self._epochs_done += 1
        with clock.paused():
            order = self._shards.order(epoch).numpy()[:samples]
            if self._worker.rank == 0:
                shared.control[NEXT] = 0
            self._workers.barrier()
        began_s, began_ns = clock.now(), time.monotonic_ns()
        end = self._thread.run_epoch(shared, order, self._rate.at(epoch * self._shards.steps + 1))
        if end == BROKEN_LOCK:
            raise CommError(f"worker {self._worker.rank} could not get the {self._strategy.name} before the deadline")
        log = self._thread.log
        self._trace.add("epoch", began_s, clock.now(), batches=len(log.loss))
        seconds = began_s - self._began_s + torch.from_numpy(log.clock_ns - began_ns) / 1e9
        losses, counts = torch.from_numpy(log.loss).double(), torch.from_numpy(log.samples).double()
        steps = torch.arange(len(losses)) + self._worker.step + 1
        self._epoch_losses = Losses(losses, counts, seconds, steps)
        self._worker.step += len(log.loss)
        status.step = self._worker.step
        status.samples += int(log.samples.sum())

    def _look_back(self) -> None:
        """The shared vector as all workers have left it."""
        if self._worker.rank == 0:
            self._worker.shared.snapshot(self._model.x)
        self._workers.broadcast(self._model.x)

    def _take_losses(self) -> Losses:
        taken, self._epoch_losses = self._epoch_losses, Losses.of([])
        return taken

    def _steps_done(self) -> int:
        return min(self._epochs_done * self._shards.steps, self._total_steps)
