"""The life of one rank in `hocket train`: Hocket's own training loop around a strategy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hocket import optim
from hocket.core.clock import RealClock
from hocket.core.comm import Comm, Rank
from hocket.core.errors import UserError
from hocket.core.server import Server, parts
from hocket.core.shard import Shards
from hocket.core.vector import FlatModel, Gradient
from hocket.core.worker import Steps, Worker
from hocket.measure.meter import Metered
from hocket.measure.trace import Trace
from hocket.rate import Rate
from hocket.spec import RunSpec, load_task
from hocket.tasks import SampleSet, Task


def run_program(rank: Rank, argument: dict[str, Any]) -> dict[str, Any]:
    """For engines that start fresh processes: the spec says it all."""
    spec = RunSpec(**argument)
    task = load_task(spec.task, spec.seed, spec.data)
    return run_rank(rank, spec, task, *task.load())


def run_rank(rank: Rank, spec: RunSpec, task: Task, train: SampleSet, test: SampleSet) -> dict[str, Any]:
    """One rank's part in a run: the first are workers, those behind them servers."""
    assert spec.workers and spec.batch
    group = rank.comm.split(rank.comm.rank >= spec.workers) if spec.make_strategy().server_ranks() else rank.comm
    if rank.comm.rank >= spec.workers:
        return serve(rank, group, spec, task, Shards(len(train), spec.workers, spec.batch, spec.seed).steps)
    return Loop(rank, group, spec, task, train, test).run()


def serve(rank: Rank, servers: Comm, spec: RunSpec, task: Task, steps_per_epoch: int) -> dict[str, Any]:
    """The life of a server rank: a part of the vector, and the strategy's server."""
    assert spec.workers and spec.lr and spec.optimizer and spec.momentum is not None
    model = FlatModel(task.build_model(spec.seed))
    x = parts(model.x, servers.size)[servers.rank]
    g = torch.zeros_like(x)
    optimizer = optim.make_flat(spec.optimizer, x, g, spec.lr, spec.momentum)
    begin_together(rank, model)
    strategy = spec.make_strategy()
    rate = Rate(spec, optimizer, steps_per_epoch)
    updates_per_step = 1 if strategy.lockstep else spec.workers
    trace = Trace(spec.trace)
    began_s = trace.origin_s = rank.clock.now()
    comm = Metered(rank.comm, rank.clock, rank.status, trace)

    descend = optim.step_of(optimizer)

    def log(event: str, **fields: Any) -> None:
        now = rank.clock.now()
        trace.add(event, now, now, **fields)

    def step() -> None:
        rate.set(1 + server.version // updates_per_step)
        descend()
        rank.status.step += 1

    server = Server(comm, rank.clock, spec.workers, x, g, step, log)
    strategy.server(server)
    seconds = rank.clock.now() - began_s
    rank.tell("events", {"events": trace.take()}, b"")
    return {
        "server": servers.rank,
        "seconds": seconds,
        "communication": comm.totals.communication_s,
        "waiting": comm.totals.waiting_s,
        "bytes_sent": comm.totals.bytes_sent,
        "messages": comm.totals.messages,
        "staleness": {str(k): v for k, v in server.staleness.items()},
        "dropped_events": trace.dropped,
    }


def begin_together(rank: Rank, model: FlatModel) -> None:
    """Everyone sets out from rank 0's weights, at the same time."""
    with rank.clock.paused():
        for tensor in [model.replica, *model.rest()]:
            rank.comm.broadcast(tensor)  # a Task may hold a module with weights of its own
        rank.comm.barrier()


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
    """Trains one replica, evaluates at the end of every epoch, and tells what happened."""

    def __init__(self, rank: Rank, workers: Comm, spec: RunSpec, task: Task, train: SampleSet, test: SampleSet) -> None:
        assert spec.workers and spec.batch and spec.lr and spec.optimizer and spec.momentum is not None
        self._rank, self._workers, self._spec, self._task = rank, workers, spec, task
        self._strategy = spec.make_strategy()
        self._device = device_of(spec.device, rank.comm.rank)
        self._train, self._test = train.to(self._device), test.to(self._device)
        self._model = FlatModel(task.build_model(spec.seed), self._device)
        self._module = self._model.model
        optimizer = optim.make(spec.optimizer, self._model, spec.lr, spec.momentum)
        self._trace = Trace(spec.trace)
        world = Metered(rank.comm, rank.clock, rank.status, self._trace)
        has_servers = workers is not rank.comm
        self._comm = Metered(workers, rank.clock, rank.status, self._trace, world.totals) if has_servers else world
        step = optim.step_of(optimizer)
        self._worker = Worker(self._comm, rank.clock, self._model, optimizer, spec.seed, step, world)
        self._shards = Shards(len(train), spec.workers, spec.batch, spec.seed)
        self._total_steps = spec.steps or self._shards.steps * (spec.epochs or 1)
        """Steps of this run, if all workers took equally many."""
        self._losses: list[tuple[Tensor, int, int]] = []
        """Loss, samples and number of each step of this epoch; left on the device, since asking would wait."""
        self._rate = Rate(spec, optimizer, self._shards.steps)
        self._snapshots: list[tuple[int, float, Tensor, list[tuple[Tensor, int, int]]]] = []
        self._curve: list[dict[str, Any]] = []
        self._verdict = "finished"
        self._diverged_at: int | None = None
        self._train_loss = math.nan

    def run(self) -> dict[str, Any]:
        rank, worker, clock = self._rank, self._worker, self._rank.clock
        if self._device.type == "cpu":
            torch.set_num_threads(1)  # or the speed-up over one worker is fake
        self._pool = None if self._strategy.lockstep else self._workers.counter()
        begin_together(rank, self._model)
        # For dropout and the like; after the barrier, since ranks that are threads share torch's generator.
        torch.manual_seed(self._spec.seed * 1_000_003 + rank.comm.rank)
        began_s = self._began_s = self._trace.origin_s = clock.now()
        self._real = RealClock()
        steps = self._strategy.worker(worker)
        next(steps)
        for done in self._epochs(steps):
            if not self._strategy.lockstep:
                self._remember(done)
            elif self._pulse(final=False):
                break
        # Where workers do not meet, one that is done must say so before it waits for the others.
        own = self._own_replica() if self._strategy.lockstep else {"consensus_distance": None}
        try:
            steps.send(None)
            raise AssertionError("a strategy must end when it is sent None")
        except StopIteration:
            pass
        self._pulse(final=True)
        seconds, real_seconds = clock.now() - began_s, self._real.now()
        with clock.paused():
            if self._pool:
                self._pool.close()
            self._comm.settle()
            if rank.comm.rank == 0:
                self._tell_model()
            return self._report(seconds) | own | {"real_seconds": real_seconds}

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
        model, module, loss_of = self._model, self._module, self._task.loss
        assert self._spec.batch
        gradient = Gradient(model.gradient, 0)
        part = 1.0 / self._spec.batch
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
                inputs, targets = self._batch(self._train, index)
                loss = loss_of(module(inputs), targets)
                torch.autograd.backward(loss)
                self._losses.append((loss.detach(), samples, worker.step + 1))
            clock.charge(samples * part)
            worker.step += 1
            status.step = worker.step
            status.samples += samples
            self._trace.add("gradient", began, clock.now(), step=worker.step, samples=samples)
            gradient.samples = samples
            gradient.of = self._shards.of(step)
            self._rate.set(epoch * self._shards.steps + step + 1)
            steps.send(gradient)
        while done < (self._total_steps - 1) // self._shards.steps:
            done += 1
            yield done

    def _batch(self, samples: SampleSet, index: Tensor) -> tuple[Any, Any]:
        inputs, targets = samples.take(index)
        return inputs.to(self._device), targets.to(self._device)

    def _pulse(self, *, final: bool) -> bool:
        """The end of an epoch: all ranks meet, the model is evaluated outside the clock. True ends the run."""
        rank, clock = self._rank, self._rank.clock
        with clock.free():
            self._comm.barrier()  # inside the clock: who is early waits
        now = clock.now() - self._began_s
        with clock.paused(), self._real.paused():
            self._look_back()
            train_loss, diverged = self._epoch_loss(self._losses)
            self._losses = []
            rank.status.loss = train_loss
            test_loss, metric = self._evaluate(self._consensus(final))
            self._record(self._steps_done(), now, train_loss, test_loss, metric)
            if diverged:
                self._verdict = "diverged"
            elif self._spec.target is not None and self._task.reached(metric, self._spec.target):
                self._verdict = "reached-target"
            if events := self._trace.take():
                rank.tell("events", {"events": events}, b"")
            self._workers.barrier()
        return self._verdict != "finished"

    def _steps_done(self) -> int:
        """Steps of this run so far; where workers do not meet, it is only asked in the end."""
        return self._worker.step if self._strategy.lockstep else self._total_steps

    def _remember(self, epochs_done: int) -> None:
        """The end of an epoch where workers do not meet: what there is to evaluate is looked at in the end."""
        with self._rank.clock.paused(), self._real.paused():
            now = self._rank.clock.now() - self._began_s
            step = epochs_done * self._shards.steps
            self._snapshots.append((step, now, self._model.replica.clone(), self._losses))
            self._losses = []
            if events := self._trace.take():
                self._rank.tell("events", {"events": events}, b"")

    def _look_back(self) -> None:
        """Evaluate the mean of what the workers had after each epoch; an epoch ends when the last is through it."""
        for step, now, replica, taken in self._snapshots:
            train_loss, diverged = self._epoch_loss(taken)
            if self._workers.size > 1:
                self._workers.all_reduce(replica, "mean")
            end = torch.tensor([now], dtype=torch.float64)
            self._workers.all_reduce(end, "max")
            test_loss, metric = self._evaluate(replica)
            self._record(step, float(end), train_loss, test_loss, metric)
            if diverged:
                self._verdict = "diverged"
        self._snapshots = []

    def _epoch_loss(self, taken: list[tuple[Tensor, int, int]]) -> tuple[float, bool]:
        """The mean training loss of an epoch, over all ranks, and whether any loss was not finite."""
        losses = torch.stack([loss for loss, _, _ in taken]).double().cpu() if taken else torch.zeros(0).double()
        weights = torch.tensor([samples for _, samples, _ in taken], dtype=torch.float64)
        bad = torch.nonzero(~torch.isfinite(losses))
        if len(bad):
            self._diverged_at = taken[int(bad[0])][2]
        sums = torch.tensor([float(losses @ weights), float(weights.sum()), float(len(bad))], dtype=torch.float64)
        self._workers.all_reduce(sums)
        if sums[1]:
            self._train_loss = float(sums[0] / sums[1])
        return self._train_loss, bool(sums[2])

    def _own_replica(self) -> dict[str, Any]:
        """How far the replicas are apart before the farewell, and how good this one is by itself."""
        with self._rank.clock.paused(), self._real.paused():
            apart = self._model.replica - self._consensus(final=False)
            square = apart.double().square().sum().reshape(1).cpu()
            self._workers.all_reduce(square, "mean")
            if not square > 0:
                return {"consensus_distance": 0.0}
            metric = float(self._test_sums(torch.arange(len(self._test)))[1]) / len(self._test)
            self._workers.barrier()
            return {"consensus_distance": _json(float(square.sqrt())), "own_metric": _json(metric)}

    def _consensus(self, final: bool) -> Tensor:
        """The mean of the replicas; at the end they are all the same."""
        replica = self._model.replica
        if final or self._workers.size == 1:
            return replica
        mean = replica.clone()
        self._workers.all_reduce(mean, "mean")
        return mean

    def _record(self, step: int, now: float, train_loss: float, test_loss: float, metric: float) -> None:
        """A point of the learning curve."""
        if self._curve and self._curve[-1]["step"] == step:
            return
        point = {
            "step": step,
            "epoch": step / self._shards.steps,
            "seconds": now,
            "train_loss": _json(train_loss),
            "test_loss": _json(test_loss),
            f"test_{self._task.metric_name}": _json(metric),
        }
        self._curve.append(point)
        if self._rank.comm.rank == 0:
            self._rank.tell("point", point, b"")

    def _evaluate(self, replica: Tensor) -> tuple[float, float]:
        """Mean loss and metric of `replica` on the test samples, of which each rank takes a share."""
        comm, own = self._workers, self._model.replica
        saved = own.clone()
        own.copy_(replica)
        sums = self._test_sums(torch.arange(len(self._test))[comm.rank :: comm.size])
        own.copy_(saved)
        comm.all_reduce(sums)
        test_loss, metric = (sums / len(self._test)).tolist()
        return test_loss, metric

    def _test_sums(self, chosen: Tensor) -> Tensor:
        """Sums of loss and metric of this rank's model over some of the test samples."""
        sums = torch.zeros(2, dtype=torch.float64)
        self._module.eval()
        with torch.no_grad():
            for index in torch.split(chosen, 2048):
                if len(index):
                    inputs, targets = self._batch(self._test, index)
                    output = self._module(inputs)
                    sums[0] += float(self._task.loss(output, targets)) * len(index)
                    sums[1] += float(self._task.metric(output, targets)) * len(index)
        self._module.train()
        return sums

    def _tell_model(self) -> None:
        from safetensors.torch import save

        state = {name: t.detach().cpu().contiguous().clone() for name, t in self._module.state_dict().items()}
        self._rank.tell("model", {}, save(state))

    def _report(self, seconds: float) -> dict[str, Any]:
        totals = self._comm.totals
        busy = totals.communication_s + totals.waiting_s
        return {
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
            "dropped_events": self._trace.dropped,
            "parameters": self._model.x.numel(),
            "verdict": self._verdict,
            "diverged_at_step": self._diverged_at,
            "curve": self._curve,
        }


def _json(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None
