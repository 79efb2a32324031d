"""The life of one rank in `hocket train`: Hocket's own training loop around a strategy."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hocket import optim
from hocket.core.clock import RealClock
from hocket.core.comm import Comm, Rank
from hocket.core.errors import UserError
from hocket.core.replica import Gradient, Replica
from hocket.core.shard import Shards
from hocket.core.sharing import Sharing
from hocket.core.worker import Steps, Worker
from hocket.drivers.judge import Judge
from hocket.drivers.plan import Plan
from hocket.drivers.schedule import Rate
from hocket.drivers.serve import begin_together, serve
from hocket.measure.losses import Losses, Milestones
from hocket.measure.meter import Metered
from hocket.measure.trace import Trace
from hocket.tasks import SampleSet, Task

SHOWN_S = 1.0
"""Compiling that takes longer than this is told to the user."""


def run_rank(rank: Rank, plan: Plan, task: Task, train: SampleSet, test: SampleSet) -> dict[str, Any]:
    """One rank's part in a run: the first are workers, those behind them servers."""
    group = rank.comm.split(rank.comm.rank >= plan.workers) if plan.made_strategy.server_ranks() else rank.comm
    if rank.comm.rank >= plan.workers:
        return serve(rank, group, plan, task, Shards(len(train), plan.workers, plan.batch, plan.seed).steps)
    if plan.compiled:
        from hocket.drivers.compiled import CompiledLoop, kernel_for  # Numba takes half a second to import

        if kernel := kernel_for(plan, task, train):
            return CompiledLoop(rank, group, plan, task, train, test, kernel).run()
    return Loop(rank, group, plan, task, train, test).run()


def device_of(name: str, rank: int) -> torch.device:
    """This rank's device; ranks share out the GPUs."""
    if name == "cpu":
        return torch.device("cpu")
    if not name.startswith("cuda"):
        raise UserError(f"device must be cpu or cuda, got {name!r}")
    if not torch.cuda.is_available():
        raise UserError("device cuda: PyTorch sees no GPU here; use --device cpu")
    return torch.device(name if ":" in name else f"cuda:{rank % torch.cuda.device_count()}")


class Loop:
    """Trains one replica, has it judged at the end of every epoch, and tells what happened."""

    def __init__(self, rank: Rank, workers: Comm, plan: Plan, task: Task, train: SampleSet, test: SampleSet) -> None:
        self._rank, self._workers, self._plan, self._task = rank, workers, plan, task
        self._strategy = plan.made_strategy
        self._device = device_of(plan.device, rank.comm.rank)
        self._train = train.to(self._device)
        self._model = Replica(task.build_model(plan.seed), self._device)
        self._judge = Judge(rank, workers, task, self._model, self._train, test.to(self._device))
        optimizer = optim.make(plan.optimizer, self._model, plan.lr, plan.momentum)
        self._trace = Trace(plan.trace)
        world = Metered(rank.comm, rank.clock, rank.status, self._trace)
        has_servers = workers is not rank.comm
        self._comm = Metered(workers, rank.clock, rank.status, self._trace, world.totals) if has_servers else world
        step = optim.step_of(optimizer)
        self._worker = Worker(self._comm, rank.clock, self._model, optimizer, plan.seed, step, world)
        self._shards = Shards(len(train), plan.workers, plan.batch, plan.seed)
        self._total_steps = plan.steps
        """Steps of this run, if all workers took equally many."""
        self._losses: list[tuple[Tensor, int, float, int]] = []
        """Loss, samples, time and number of each step of this epoch; left on the device, since asking would wait."""
        self._rate = Rate(plan, optimizer, self._shards.steps)
        self._snapshots: list[tuple[int, float, Tensor, Losses]] = []
        self._verdict = "finished"
        self._diverged_at: int | None = None
        self._train_loss = math.nan
        self._compile_s = 0.0

    @property
    def meets(self) -> bool:
        """Whether all workers are together at the end of an epoch."""
        return self._strategy.lockstep

    def run(self) -> dict[str, Any]:
        rank, clock = self._rank, self._rank.clock
        if self._device.type == "cpu":
            torch.set_num_threads(1)  # or the speed-up over one worker is fake
        self._pool = None if self._strategy.lockstep else self._workers.counter()
        begin_together(rank, self._model)
        sharing = self._strategy.sharing(self._model.x.numel(), self._worker.size)
        if sharing is not None:
            self._share(sharing)
        with clock.paused():
            self._milestones = Milestones(self._judge.initial_loss())
            self._workers.barrier()
        # For dropout and the like; after the barrier, since ranks that are threads share torch's generator.
        torch.manual_seed(self._plan.seed * 1_000_003 + rank.comm.rank)
        began_s = self._began_s = self._trace.origin_s = clock.now()
        self._real = RealClock()
        own = self._train_epochs()
        self._pulse(final=True)
        seconds, real_seconds = clock.now() - began_s, self._real.now()
        with clock.paused():
            if self._pool:
                self._pool.close()
            self._comm.settle()
            if rank.comm.rank == 0:
                self._tell_model()
            return self._report(seconds) | own | {"real_seconds": real_seconds}

    def _share(self, sharing: Sharing) -> None:
        """Put the parameters into shared memory; what works on it may have to be compiled first."""
        self._rank.status.operation = "compile"
        began = time.perf_counter()
        self._worker.shared = self._workers.share(sharing, self._model.x)
        self._compile_s += time.perf_counter() - began
        self._rank.status.operation = "compute"
        if self._compile_s > SHOWN_S and self._rank.comm.rank == 0:
            line = f"compiled in {self._compile_s:.1f} s (outside the clock; kept for the next run)"
            self._rank.tell("note", {"line": line}, b"")

    def _train_epochs(self) -> dict[str, Any]:
        """All the training; returns what is known of this replica before the farewell."""
        steps = self._strategy.worker(self._worker)
        next(steps)
        for done in self._epochs(steps):
            if not self.meets:
                self._remember(done)
            elif self._pulse(final=False):
                break
        before = self._model.replica.clone()
        try:
            steps.send(None)
            raise AssertionError("a strategy must end when it is sent None")
        except StopIteration:
            pass
        if not self.meets and ("shared-memory" in self._strategy.needs or self._strategy.server_ranks()):
            return {"consensus_distance": None}  # what counts is in one place; a worker has a copy of some age
        with self._rank.clock.paused(), self._real.paused():
            return self._judge.own_replica(before)

    def _assignments(self) -> Iterator[tuple[int, int, int]]:
        """The epoch, step and share of each batch that this worker computes.

        Where all take their steps together, each has its own share. Else there is one pool of batches, in the same
        order: who is fast takes more of them.
        """
        total, steps, workers = self._total_steps, self._shards.steps, self._worker.size
        if self._strategy.lockstep:
            for step in range(total):
                yield step // steps, step % steps, self._worker.rank
            return
        assert self._pool is not None
        while (ticket := self._pool.take()) < total * workers:
            step, share = divmod(ticket, workers)
            yield step // steps, step % steps, share

    def _epochs(self, steps: Steps) -> Iterator[int]:
        """Feed the strategy; pause after each epoch but the last, with the number of epochs that are done."""
        worker, status, clock = self._worker, self._rank.status, self._rank.clock
        model, module, loss_of = self._model, self._model.model, self._task.loss
        gradient = Gradient(model.gradient, 0)
        part = 1.0 / self._plan.batch
        module.train()
        done = 0
        for epoch, step, share in self._assignments():
            while done < epoch:
                done += 1
                yield done
            status.stop()
            began = clock.now()
            index = self._shards.batch(epoch, step, share)
            samples = len(index)
            model.g.zero_()
            if samples:
                inputs, targets = self._train.take(index)
                loss = loss_of(module(inputs.to(self._device)), targets.to(self._device))
                torch.autograd.backward(loss)
                self._losses.append((loss.detach(), samples, began - self._began_s, worker.step + 1))
            clock.charge(samples * part)
            worker.step += 1
            status.step = worker.step
            status.samples += samples
            self._trace.add("gradient", began, clock.now(), step=worker.step, samples=samples)
            gradient.samples = samples
            gradient.step_samples = self._shards.step_samples(step)
            self._rate.set(epoch * self._shards.steps + step + 1)
            steps.send(gradient)
        while done < (self._total_steps - 1) // self._shards.steps:
            done += 1
            yield done

    def _pulse(self, *, final: bool) -> bool:
        """The end of an epoch: all ranks meet, the model is evaluated outside the clock. True ends the run."""
        rank, clock = self._rank, self._rank.clock
        with clock.free():
            self._comm.barrier()  # inside the clock: who is early waits
        now = clock.now() - self._began_s
        with clock.paused(), self._real.paused():
            self._look_back()
            train_loss, diverged = self._epoch_loss(self._take_losses())
            rank.status.loss = train_loss
            replica = self._model.replica if final else self._judge.mean_replica()
            test_loss, metric = self._judge.evaluate(replica)
            self._record(self._steps_done(), now, train_loss, test_loss, metric)
            if diverged:
                self._verdict = "diverged"
            elif self._plan.goal.reached(metric):
                self._verdict = "reached-target"
            if events := self._trace.take():
                rank.tell("events", {"events": events}, b"")
            self._workers.barrier()
        return self._verdict != "finished"

    def _steps_done(self) -> int:
        """Steps of this run so far; where workers do not meet, it is only asked in the end."""
        return self._worker.step if self._strategy.lockstep else self._total_steps

    def _take_losses(self) -> Losses:
        """The losses since the last time."""
        entries, self._losses = self._losses, []
        return Losses.of(entries)

    def _remember(self, epochs_done: int) -> None:
        """The end of an epoch where workers do not meet: what there is to evaluate is looked at in the end."""
        with self._rank.clock.paused(), self._real.paused():
            now = self._rank.clock.now() - self._began_s
            step = epochs_done * self._shards.steps
            self._snapshots.append((step, now, self._model.replica.clone(), self._take_losses()))
            if events := self._trace.take():
                self._rank.tell("events", {"events": events}, b"")

    def _look_back(self) -> None:
        """Evaluate the mean of what the workers had after each epoch; an epoch ends when the last is through it."""
        for step, now, replica, losses in self._snapshots:
            train_loss, diverged = self._epoch_loss(losses)
            if self._workers.size > 1:
                self._workers.all_reduce(replica, "mean")
            end = torch.tensor([now], dtype=torch.float64)
            self._workers.all_reduce(end, "max")
            test_loss, metric = self._judge.evaluate(replica)
            self._record(step, float(end), train_loss, test_loss, metric)
            if diverged:
                self._verdict = "diverged"
        self._snapshots = []

    def _record(self, step: int, now: float, train_loss: float, test_loss: float, metric: float) -> None:
        self._judge.record(step, step / self._shards.steps, now, train_loss, test_loss, metric)

    def _epoch_loss(self, losses: Losses) -> tuple[float, bool]:
        """The mean training loss of an epoch, over all ranks, and whether any loss was not finite."""
        self._milestones.see(losses)
        if self._diverged_at is None:
            self._diverged_at = losses.diverged_at()
        sums = losses.sums()
        self._workers.all_reduce(sums)
        if sums[1]:
            self._train_loss = float(sums[0] / sums[1])
        return self._train_loss, bool(sums[2])

    def _tell_model(self) -> None:
        from safetensors.torch import save

        state = self._model.model.state_dict()
        self._rank.tell("model", {}, save({name: t.detach().cpu().contiguous().clone() for name, t in state.items()}))

    def _report(self, seconds: float) -> dict[str, Any]:
        totals = self._comm.totals
        busy = totals.communication_s + totals.waiting_s
        report = {
            "seconds": seconds,
            "steps": self._worker.step,
            "steps_done": self._steps_done(),
            "epochs": self._steps_done() / self._shards.steps,
            "samples": self._rank.status.samples,
            "compute": max(seconds - busy, 0.0),
            "communication": totals.communication_s,
            "waiting": totals.waiting_s,
            "bytes_sent": totals.bytes_sent,
            "messages": totals.messages,
            "staleness": {str(k): v for k, v in self._worker.staleness.items()},
            "time_to_loss": {f"{part:g}": now for part, now in self._milestones.seconds.items()},
            "dropped_events": self._trace.dropped,
            "parameters": self._model.x.numel(),
            "verdict": self._verdict,
            "diverged_at_step": self._diverged_at,
            "curve": self._judge.curve,
        }
        return report | (self._shared_memory(seconds) if "shared-memory" in self._strategy.needs else {})

    def _shared_memory(self, seconds: float) -> dict[str, Any]:
        """What happened to the shared vector; its staleness counts, not that of the steps by which workers find
        their way. Rank 0 speaks for all."""
        if self._rank.comm.rank:
            return {"staleness": {}}
        found = self._worker.shared.statistics()
        return {
            "staleness": {str(k): v for k, v in found.staleness.items()},
            "compile_seconds": self._compile_s,
            "shared": {
                "updates": found.updates,
                "updates_per_s": found.updates / max(seconds, 1e-9),
                "dropped": found.dropped,
                "failed_tries": {str(k): v for k, v in sorted(found.tries.items())},
                "lock_wait_s": found.lock_wait_s,
                "peak_vectors": found.peak_vectors,
                "recovered_locks": found.recovered,
            },
        }
