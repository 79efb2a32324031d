"""The user's own PyTorch loop under a strategy: `with hocket.join(...) as team`."""

from __future__ import annotations

import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from hocket.core.comm import Rank
from hocket.core.environment import inside_mpi, inside_torchrun
from hocket.core.errors import UserError
from hocket.core.replica import Gradient, Replica
from hocket.core.shard import Shards
from hocket.core.status import Status
from hocket.core.worker import Worker
from hocket.engines import mpi
from hocket.engines import torch as torch_engine
from hocket.engines.catalogue import DEADLINE_S
from hocket.engines.local import LocalComm, current
from hocket.engines.threads import ThreadWorld
from hocket.measure.meter import Metered
from hocket.measure.trace import Trace
from hocket.strategies import Strategy
from hocket.strategies import strategy as strategies

M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741


@contextmanager
def join(strategy: str = "allreduce", *, seed: int = 0, deadline: float = DEADLINE_S) -> Iterator[Team]:
    """Join the ranks that `hocket launch`, mpiexec or torchrun started; alone, be a team of one."""
    chosen = strategies.make(strategy)
    threads = torch.get_num_threads()
    rank, abort = _find_rank(deadline)
    if chosen.server_ranks():
        raise UserError(f"strategy {chosen.name} needs server ranks, which join does not have; use hocket.fit")
    chosen.check(rank.comm.size)
    team = Team(rank, chosen, seed)
    try:
        yield team
        team.finish()
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            raise
        if abort is not None and rank.comm.size > 1:
            where = f"rank {rank.comm.rank} failed in {rank.status.operation}: {type(error).__name__}: {error}"
            print(f"hocket: {where}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            time.sleep(0.2)  # let the launcher pass the message on before everything ends
            abort()
        raise
    finally:
        torch.set_num_threads(threads)


def _find_rank(deadline: float) -> tuple[Rank, Callable[[], None] | None]:
    """This process's or thread's place, and how to end all ranks where nobody else would."""
    found: Rank | None = getattr(current, "rank", None)
    if found is not None:
        return found, None
    world = ThreadWorld(1, deadline)

    def tell(kind: str, data: dict[str, Any], blob: bytes) -> None:
        pass

    torch.set_num_threads(1)  # a worker has one, however many there are
    if inside_torchrun():
        return Rank(torch_engine.connect(deadline), world.clock(0), tell, Status()), torch_engine.abort
    if inside_mpi():
        return Rank(mpi.connect(deadline), world.clock(0), tell, Status()), mpi.abort
    return Rank(LocalComm(world, 0, [0], 0), world.clock(0), tell, Status()), None


class Team:
    """The ranks that train together, as one of them sees it."""

    def __init__(self, rank: Rank, strategy: Strategy, seed: int) -> None:
        self._rank, self._strategy, self._seed = rank, strategy, seed
        self._comm = Metered(rank.comm, rank.clock, rank.status, Trace(0))
        self._samples: float | None = None
        self._worker: Worker | None = None
        self._ended = False

    @property
    def rank(self) -> int:
        """This worker's number; rank 0 is the one to print and save."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """How many workers there are."""
        return self._comm.size

    @property
    def bytes_sent(self) -> int:
        """What this worker has sent so far."""
        return self._comm.totals.bytes_sent

    def prepare(self, model: M, optimizer: O) -> tuple[M, O]:
        """Bring model and optimizer under the strategy. Everyone starts from rank 0's weights."""
        if self._worker is not None:
            raise UserError("team.prepare takes one model and one optimizer, once; join again for another")
        if isinstance(optimizer, torch.optim.LBFGS):
            group = optimizer.param_groups[0]
            if group["max_iter"] != 1 or group["line_search_fn"] is not None:
                raise UserError(
                    "LBFGS evaluates several gradients a step; use LBFGS(..., max_iter=1, line_search_fn=None)"
                )
        flat = Replica(model)
        for tensor in [flat.replica, *flat.rest()]:
            self._rank.comm.broadcast(tensor)
        original = optimizer.step
        loss: list[Any] = [None]
        needs_closure = isinstance(optimizer, torch.optim.LBFGS)

        def original_step() -> object:
            return original(lambda: loss[0]) if needs_closure else original()

        worker = Worker(self._comm, self._rank.clock, flat, optimizer, self._seed, original_step)
        sharing = self._strategy.sharing(flat.x.numel(), self.size)
        if sharing is not None:
            worker.shared = self._comm.share(sharing, flat.x)
        steps = self._strategy.worker(worker)
        next(steps)
        gradient = Gradient(flat.gradient, 1)

        # The optimizer stays the user's object, so that schedulers and checkpoints go on working.
        def step(_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            self._rank.status.stop()
            if self._ended:
                raise UserError("the team has ended; call optimizer.step() inside the 'with hocket.join(...)' block")
            if closure is not None:
                with torch.enable_grad():
                    loss[0] = closure()
            flat.collect()
            gradient.samples = 1.0 if self._samples is None else self._samples
            self._samples = None
            self._rank.clock.charge(1.0)
            worker.step += 1
            self._rank.status.step = worker.step
            self._rank.status.samples += int(gradient.samples)
            steps.send(gradient)
            return loss[0]

        def zero_grad(_: torch.optim.Optimizer, set_to_none: bool = True) -> None:
            flat.collect()
            flat.g.zero_()

        # A scheduler that was made before has wrapped `original`, and looks for its mark.
        if hasattr(original, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.zero_grad = types.MethodType(zero_grad, optimizer)  # type: ignore[method-assign]
        self._worker, self._steps = worker, steps
        return model, optimizer

    def shard(self, dataset: Dataset[Any], batch_size: int, **options: Any) -> DataLoader[Any]:
        """A DataLoader over this worker's part of the data, shuffled anew each epoch.

        `batch_size` is each worker's; `options` go to DataLoader (num_workers, collate_fn, ...).
        """
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise UserError("team.shard needs a dataset with a length (map-style); an IterableDataset has none")
        samples = len(dataset)
        if not 1 <= batch_size <= samples // self.size:
            raise UserError(
                f"batch_size must be between 1 and a worker's shard of {samples // self.size} samples, got {batch_size}"
            )
        for name in ("shuffle", "sampler", "batch_sampler", "drop_last"):
            if name in options:
                raise UserError(f"team.shard chooses the samples itself; leave {name} out")
        sampler = _ShardSampler(Shards(samples, self.size, batch_size, self._seed), self.rank, batch_size)
        return _ShardLoader(self, dataset, sampler, options)

    def saw(self, samples: int) -> None:
        """Count samples towards the weight of the next gradient; `shard`'s loader does it for you."""
        self._samples = (self._samples or 0.0) + samples

    def forget(self) -> None:
        """Drop what was counted since the last step."""
        self._samples = None

    def finish(self) -> None:
        """The farewell: the strategy ends, and everyone has one model."""
        self._ended = True
        if self._worker is not None:
            try:
                self._steps.send(None)
            except StopIteration:
                pass


class _ShardSampler(Sampler[list[int]]):
    """This rank's batches of one epoch."""

    def __init__(self, shards: Shards, rank: int, batch_size: int) -> None:
        self._shards, self._rank, self._batch_size = shards, rank, batch_size
        self.epoch = -1
        self.weights: list[int] = []

    def __len__(self) -> int:
        return self._shards.steps

    def __iter__(self) -> Iterator[list[int]]:
        batches = self._shards.epoch(self.epoch, self._rank)
        # Where the last global batch has nothing for this rank it computes on a stand-in that counts for nothing:
        # the step still needs it to take part.
        stand_in = self._shards.order(self.epoch)[: self._batch_size]
        self.weights[:] = [len(b) for b in batches]
        return iter([(b if len(b) else stand_in).tolist() for b in batches])


class _ShardLoader(DataLoader[Any]):
    """A DataLoader that tells the team how many samples each batch counts for."""

    def __init__(self, team: Team, dataset: Dataset[Any], sampler: _ShardSampler, options: dict[str, Any]) -> None:
        super().__init__(dataset, batch_sampler=sampler, **options)
        self._team, self._shard_sampler = team, sampler

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._shard_sampler.epoch += 1
        training = torch.is_grad_enabled()  # validation counts for no gradient
        if training:
            self._team.forget()  # nor does a batch that was taken and not used
        for step, batch in enumerate(super().__iter__()):
            if training:
                self._team.saw(self._shard_sampler.weights[step])
            yield batch
