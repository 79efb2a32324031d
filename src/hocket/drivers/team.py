"""The user's own PyTorch loop under a strategy: `with hocket.join(...) as team`."""

from __future__ import annotations

import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hocket import optim
from hocket.compress import Compressor, Identity
from hocket.core.comm import Rank
from hocket.core.environment import inside_mpi, inside_torchrun
from hocket.core.errors import UserError
from hocket.core.replica import Gradient, Replica
from hocket.core.shard import Shards
from hocket.core.status import Status
from hocket.core.weight import Weight
from hocket.drivers import checkpoint
from hocket.drivers.loader import ShardLoader
from hocket.drivers.plan import compressor_for
from hocket.drivers.session import Session
from hocket.engines import mpi
from hocket.engines import torch as torch_engine
from hocket.engines.catalogue import DEADLINE_S, engine
from hocket.engines.local import LocalComm, current
from hocket.engines.threads import ThreadWorld
from hocket.strategies import Strategy
from hocket.strategies import strategy as strategies

M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741


@contextmanager
def join(
    strategy: str = "allreduce", *, compress: str = "none", seed: int = 0, deadline: float = DEADLINE_S
) -> Iterator[Team]:
    """Join the ranks that `hocket launch`, mpiexec or torchrun started; alone, be a team of one.

    A strategy with servers takes the last ranks for them: these serve inside `team.prepare`, and their script ends
    there when the others are done.
    """
    chosen = strategies.make(strategy)
    compressor = compressor_for(compress, chosen)
    threads = torch.get_num_threads()
    rank, abort = _find_rank(deadline)
    if missing := chosen.needs - rank.offers:
        able = " or ".join(name for name in engine if chosen.needs <= engine[name].offers)
        raise UserError(f"strategy {chosen.name} needs {', '.join(sorted(missing))}; start the ranks on engine {able}")
    workers = rank.comm.size - chosen.server_ranks()
    if workers < 1:
        raise UserError(
            f"strategy {chosen.name} takes {chosen.server_ranks()} ranks as servers, which leaves no worker of "
            f"{rank.comm.size}; start {chosen.server_ranks() + 1} ranks or more, such as with hocket launch -n"
        )
    chosen.check(workers)
    team = Team(rank, chosen, workers, seed, compressor)
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
        offers = torch_engine.TorchDistributed.offers
        return Rank(torch_engine.connect(deadline), world.clock(0), tell, Status(), offers), torch_engine.abort
    if inside_mpi():
        return Rank(mpi.connect(deadline), world.clock(0), tell, Status(), mpi.Mpi.offers), mpi.abort
    return Rank(LocalComm(world, 0, [0], 0), world.clock(0), tell, Status(), world.offers), None


class Team:
    """The workers that train together, as one of them sees it."""

    def __init__(self, rank: Rank, strategy: Strategy, workers: int, seed: int, compressor: Compressor) -> None:
        self._rank, self._strategy, self._seed, self._compressor = rank, strategy, seed, compressor
        self._session: Session | None = None
        self._samples: float | None = None
        self._loaders: list[ShardLoader] = []
        self._ended = False
        self.size = workers
        """How many workers there are."""
        self.rank = rank.comm.rank
        """This worker's number; rank 0 is the one to print and save. Servers have numbers behind the workers'."""

    @property
    def bytes_sent(self) -> int:
        """What this worker has sent so far."""
        return self._session.totals.bytes_sent if self._session else 0

    def prepare(self, model: M, optimizer: O) -> tuple[M, O]:
        """Bring model and optimizer under the strategy. Everyone starts from rank 0's weights.

        A server rank serves here until all workers are done; then its script ends.
        """
        if self._session is not None:
            raise UserError("team.prepare takes one model and one optimizer, once; join again for another")
        _check_optimizer(optimizer, servers=self._strategy.server_ranks())
        replica = Replica(model)
        self._compressor.check_model([p.shape for p in replica.parameters])
        device = replica.x.device
        session = Session(self._rank, self._strategy, self.size, self._seed, device, None, self._compressor)
        session.begin(replica)
        if session.is_server:
            _serve(session, replica, optimizer)
            raise SystemExit(0)
        self._session = session
        self._take_over(session, replica, optimizer)
        return model, optimizer

    def _take_over(self, session: Session, replica: Replica, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer stays the user's object, so that schedulers and checkpoints go on working."""
        original = optimizer.step
        loss: list[Any] = [None]
        needs_closure = isinstance(optimizer, torch.optim.LBFGS)

        def original_step() -> object:
            return original(lambda: loss[0]) if needs_closure else original()

        session.work(optimizer, original_step)
        session.start()
        gradient = Gradient(replica.g, Weight())

        def step(_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            self._rank.status.stop()
            if self._ended:
                raise UserError("the team has ended; call optimizer.step() inside the 'with hocket.join(...)' block")
            if closure is not None:
                with torch.enable_grad():
                    loss[0] = closure()
            replica.collect()
            gradient.weight = Weight(1.0 if self._samples is None else self._samples, None)
            self._samples = None
            self._rank.clock.charge(1.0)
            if session.worker.on_part is not None:
                for part in replica.parts:  # backward is the user's: all are complete by now
                    session.worker.on_part(part)
            session.step(gradient)
            return loss[0]

        def zero_grad(_: torch.optim.Optimizer, set_to_none: bool = True) -> None:
            replica.collect()
            replica.g.zero_()

        # A scheduler that was made before has wrapped `original`, and looks for its mark.
        if hasattr(original, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.zero_grad = types.MethodType(zero_grad, optimizer)  # type: ignore[method-assign]

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
        shards = Shards(samples, self.size, batch_size, self._seed)
        loader = ShardLoader(self, dataset, shards, self.rank % self.size, batch_size, options)
        self._loaders.append(loader)
        return loader

    def saw(self, samples: int) -> None:
        """Count samples towards the weight of the next gradient; `shard`'s loader does it for you."""
        self._samples = (self._samples or 0.0) + samples

    def forget(self) -> None:
        """Drop what was counted since the last step."""
        self._samples = None

    def save(self, path: str | Path, **more: Any) -> None:
        """Save model, optimizer, strategy and the position in the data to one file; all workers call it together.

        `more` is saved too: objects with a `state_dict`, such as a scheduler, and plain values, such as an epoch.
        """
        session = self._prepared("save")
        values = {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in more.items()}
        driver = {"more": values, "loaders": [loader.position() for loader in self._loaders]}
        with session.pause():
            try:
                states = session.gather(driver)
            except TypeError as error:
                raise UserError(f"team.save: {error}") from None
            if states:
                about = self._about(session) | {"step": session.worker.step}
                checkpoint.write(Path(path), checkpoint.pack(about, states))

    def load(self, path: str | Path, **more: Any) -> dict[str, Any]:
        """Go on from a file that `save` wrote; all workers call it together, after `prepare` and `shard`.

        Objects in `more` get the state that was saved under their name. Returns the plain values that were saved.
        """
        session = self._prepared("load")
        found = None
        if self.rank == 0:
            found = checkpoint.read(Path(path))
            checkpoint.check(Path(path), found.about, self._about(session))
            found = checkpoint.for_workers(Path(path), found, self._about(session))
        state = session.load(found)
        session.load_random(state)
        driver = state["driver"]
        for loader, position in zip(self._loaders, driver["loaders"], strict=False):
            loader.go_to(*position)
        for name, value in more.items():
            if name not in driver["more"]:
                raise UserError(f"team.load: nothing was saved as {name}; there are: {', '.join(driver['more'])}")
            value.load_state_dict(driver["more"][name])
        return {name: value for name, value in driver["more"].items() if name not in more}

    def _about(self, session: Session) -> dict[str, Any]:
        servers, parameters = self._strategy.server_ranks(), session.replica.x.numel()
        name = type(session.optimizer).__name__
        strategy = repr(self._strategy)
        if not isinstance(self._compressor, Identity):
            strategy += f" with {self._compressor}"
        known = {"strategy": strategy, "workers": self.size, "servers": servers}
        return known | {"optimizer": name, "parameters": parameters}

    def _prepared(self, what: str) -> Session:
        if self._session is None:
            raise UserError(f"call team.prepare before team.{what}")
        return self._session

    def finish(self) -> None:
        """The farewell: the strategy ends, and everyone has one model."""
        self._ended = True
        if self._session is not None:
            self._session.end()


def _check_optimizer(optimizer: torch.optim.Optimizer, servers: int) -> None:
    if not isinstance(optimizer, torch.optim.LBFGS):
        return
    if servers:
        raise UserError("LBFGS needs the loss at every step, which a server does not have; use another optimizer")
    group = optimizer.param_groups[0]
    if group["max_iter"] != 1 or group["line_search_fn"] is not None:
        raise UserError("LBFGS evaluates several gradients a step; use LBFGS(..., max_iter=1, line_search_fn=None)")


def _serve(session: Session, replica: Replica, optimizer: torch.optim.Optimizer) -> None:
    """A server steps as the user's optimizer would: with it, where it holds the whole model, else with parts of it."""
    if session.group.size > 1:
        optimizer = optim.of_part(optimizer, replica, session.span())
    x, g = session.part_of(replica.x), session.part_of(replica.g)
    session.serve(x, g, optimizer, optimizer.step)
