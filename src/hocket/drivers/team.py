"""The workers that train together in a loop of the user's own, as one of them sees it."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hocket.compress import Compressor, Identity, text_of
from hocket.core.comm import Comm, Counter, Rank
from hocket.core.errors import CommError, UserError, shown
from hocket.core.registry import described
from hocket.core.replica import Replica
from hocket.core.seeds import seed_everything, stream
from hocket.drivers import checkpoint
from hocket.drivers.fitting import check, for_workers
from hocket.drivers.loader import PASSES, Loader, Tickets, make_loader
from hocket.drivers.outcome import Outcome
from hocket.drivers.prepared import Prepared, check_optimizer
from hocket.drivers.session import Session
from hocket.drivers.split_model import seat, split_for_a_loop
from hocket.drivers.talk import Talk
from hocket.drivers.watch import compare_replicas
from hocket.layouts.mesh import Mesh
from hocket.layouts.portion import AllOfIt
from hocket.measure.meter import Metered, Totals
from hocket.measure.result import Result
from hocket.measure.sometimes import Sometimes
from hocket.measure.trace import Trace
from hocket.strategies import Strategy

M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741
V = TypeVar("V")


class Team(Talk):
    """`hocket.join` makes it. Methods that make the workers meet say so; all of them call those equally often."""

    def __init__(
        self,
        rank: Rank,
        strategy: Strategy,
        text: str,
        workers: int,
        seed: int,
        compressor: Compressor,
        mesh: Mesh | None = None,
    ) -> None:
        self._strategy, self._seed, self._compressor, self._mesh = strategy, seed, compressor, mesh
        self._rank = seat(rank, mesh) if mesh else rank
        self._prepared: list[Prepared] = []
        self._loaders: list[Loader] = []
        self._left = False
        self._totals = Totals()
        self.size = workers
        """How many workers there are."""
        self.rank = rank.comm.rank
        """This rank's number; rank 0 is the one to print and save. It is the worker's, unless a model is split: then a
        worker is several ranks. Servers have numbers behind the workers'."""
        self.worker = self._rank.comm.rank
        """This worker's number, which all ranks with parts of its model have."""
        self.is_server = self.worker >= workers
        self._workers: Comm | None = self._rank.comm.split(int(self.is_server)) if strategy.server_ranks() else None
        self._meeting: Comm | None = None
        self._counter: Counter | None = None
        self._drawn_from = itertools.count()
        self._outcome = Outcome(self._rank, strategy, text, workers, seed, mesh.layout if mesh else None)

    @property
    def comm(self) -> Comm:
        """Messages and collectives among the workers, for a program that is parallel by itself; nothing that a
        strategy sends can come between. Made when it is first asked for, by all workers together."""
        if self._workers is None:
            self._workers = self._rank.comm.split(0)
        if not isinstance(self._workers, Metered):
            self._workers = self._metered(self._workers)
        return self._workers

    def _metered(self, comm: Comm) -> Metered:
        return Metered(comm, self._rank.clock, self._rank.status, Trace(0), self._totals)

    @property
    def meeting(self) -> Comm:
        """Workers that take their steps together meet where the steps do, so that one who calls something else is
        noticed at once. (Parts of gradients that leave before the step have no place in that order.)"""
        if self._meeting is None and self._prepared and self._strategy.lockstep and self._prepared[0].early is None:
            self._meeting = self._metered(self._prepared[0].session.group)
        return self._meeting or self.comm

    def everyone(self) -> Comm:
        """Before `prepare`, servers run the user's script too."""
        return self._rank.comm if not self._prepared and self._strategy.server_ranks() else self.meeting

    @property
    def bytes_sent(self) -> int:
        """What this worker has sent so far."""
        return self._totals.bytes_sent + sum(one.session.totals.bytes_sent for one in self._prepared)

    # Training

    def prepare(self, model: M, optimizer: O) -> tuple[M, O]:
        """Bring a model and its optimizer under the strategy. Everyone starts from rank 0's weights and optimizer.

        Call it again for further models, each with an optimizer of its own. From the first call on, the random numbers
        of torch, NumPy and Python differ from worker to worker. A server rank serves here until all workers are done;
        then its script ends. Where a model is split, the model that is returned is this rank's part.
        """
        if self._prepared and self._strategy.server_ranks():
            raise UserError(
                f"servers serve one model: with strategy {self._strategy.name}, team.prepare takes one model and one "
                f"optimizer, once; use another strategy for several"
            )
        given: tuple[Any, Any] = (model, optimizer)  # whatever it was annotated as
        if not isinstance(given[0], nn.Module) or not isinstance(given[1], torch.optim.Optimizer):
            got = f"{type(model).__name__} and {type(optimizer).__name__}"
            raise UserError(f"team.prepare takes a model and its optimizer, in this order; got {got}")
        if any(model is one.model or optimizer is one.optimizer for one in self._prepared):
            raise UserError("team.prepare has this model or optimizer already; call it once for each pair")
        check_optimizer(model, optimizer, servers=self._strategy.server_ranks())
        self._compressor.check_model([p.shape for p in model.parameters() if p.requires_grad])
        prepared = self._bring_under(model, optimizer)
        prepared.begin()
        rank = self._rank
        if self.is_server:
            began_s = rank.clock.now()
            self._outcome.tell_of_server(prepared.session, prepared.serve(), began_s)
            raise SystemExit(0)
        prepared.work()
        self._prepared.append(prepared)
        if len(self._prepared) == 1:
            with rank.clock.paused():
                self.comm.barrier()  # made here, before anybody leaves; and ranks that are threads share generators
                if not self._strategy.lockstep:
                    self._counter = self.comm.counter(PASSES)
                seed_everything(stream(self._seed, "model", self.worker))
            self._outcome.begin(prepared)
        return cast(M, prepared.model), optimizer

    def _bring_under(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Prepared:
        """The whole model or, with a layout, this rank's part of it."""
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        rank, mesh = self._rank, self._mesh
        if self._prepared:  # what one model's strategy says must not reach another's
            rank = dataclasses.replace(rank, comm=rank.comm.split(0))
        trace = Trace(fine=True) if rank.draws else None
        session = Session(rank, self._strategy, self.size, self._seed, device, trace, self._compressor, mesh)
        if mesh is None:
            replica = Replica(model)
            return Prepared(session, replica, AllOfIt(replica), optimizer)
        within = Sometimes(session.beside(mesh.within), mesh.within)
        with rank.clock.paused():
            placed = split_for_a_loop(mesh, within, model, optimizer)
        return Prepared(session, placed.replica, placed.portion, optimizer, within)

    def shard(self, dataset: Any, batch_size: int = 1, **options: Any) -> DataLoader[Any]:
        """A DataLoader over this worker's part of the data, shuffled anew each epoch.

        `batch_size` is each worker's. `shuffle=False`, `drop_last=True` and `sampler` mean what they mean to a
        DataLoader, of all workers' batches together; other options go to it (num_workers, collate_fn, ...). Where
        workers do not wait for each other, batches come from one pool: who is fast takes more of them.
        """
        loader: Any = make_loader(self, dataset, batch_size, self.size, self.worker % self.size, self._seed, options)
        self._loaders.append(loader)
        found: DataLoader[Any] = loader  # one of a stream is iterated like it
        return found

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass over each of the loaders be this epoch's: its order follows from seed and epoch."""
        for loader in self._loaders:
            loader.set_epoch(epoch)

    def saw(self, samples: int) -> None:
        """Count samples towards the weight of the next gradient; `shard`'s loader does it for you."""
        for one in self._prepared:
            one.unweighed = (one.unweighed or 0.0) + samples

    def forget(self) -> None:
        """Drop what was counted since the last step."""
        for one in self._prepared:
            one.unweighed = None

    def tickets(self, given: int) -> Tickets | None:
        """For a loader: what batches are drawn from where workers do not wait for each other. Nobody waits here."""
        if self._counter is None:
            return None
        if (number := next(self._drawn_from)) >= PASSES:
            raise UserError(f"more than {PASSES:,} loaders gave batches; make them once, before the loop")
        return Tickets(self._counter, number, given, self._mesh.model if self._mesh else None)

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """As torch.nn.utils.clip_grad_norm_, of the gradient that the optimizer will see at the next step: the mean
        over the workers under a strategy that averages gradients, else this worker's own.

        The norm that it returns is filled in by `optimizer.step()`.
        """
        if not max_norm >= 0:
            raise UserError(f"team.clip_grad_norm_: max_norm must be 0 or more, got {shown(max_norm)}")
        chosen: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for one in self._prepared:
            if one.holds([p for p in chosen if p.requires_grad]):
                return one.clip([p for p in chosen if p.requires_grad], max_norm, norm_type)
        raise UserError("team.clip_grad_norm_ takes parameters of one prepared model; call team.prepare first")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, `backward` only adds gradients up: for all but the last before a step, under a strategy that sends
        them while they are computed. Elsewhere they always wait for the step."""
        with ExitStack() as stack:
            for one in self._prepared:
                if one.early is not None:
                    stack.enter_context(one.early.held())
            yield

    def average(self) -> None:
        """Replace all replicas by their mean, now. The workers meet."""
        for one in self._all_prepared("average"):
            with self.named("average"):
                one.session.worker.average_replicas()
                one.replica.spread()

    def evaluate(self, fn: Callable[..., V]) -> V:
        """`fn(model)`, with the values that the strategy would return if the block ended now; outside the clock.

        Of several models it gets all. They are in eval mode, and no gradients are kept. A number, or a dict of
        numbers, becomes a point of the result's learning curve. The workers meet, unless what counts lies in one
        place, such as on a server.
        """
        prepared = self._all_prepared("evaluate")
        with self.named("evaluate"), self._aside() as now, ExitStack() as stack:
            for one in prepared:
                stack.enter_context(one.replica.holding(one.returned()))
                stack.enter_context(one.uncounted())
                stack.enter_context(one.evaluating())
            with torch.no_grad():
                value = fn(*(one.model for one in prepared))
        self._outcome.record(value, now, self._loaders)
        return value

    @contextmanager
    def _aside(self) -> Iterator[float]:
        """Outside the clock, from where workers go on as far apart as they came."""
        clock, everyone = self._rank.clock, self._prepared[0].session.everyone
        now = clock.now()
        with clock.paused():
            times = torch.tensor([-now, now], dtype=torch.float64)
            if self._strategy.lockstep:
                everyone.all_reduce(times, "max")
            yield float(times[1])
            ranks = everyone.size if self._strategy.lockstep else 1
            clock.come_back(now, -float(times[0]), ranks)

    # Saving

    def save(self, path: str | Path, **more: Any) -> None:
        """Save models, optimizers, strategy and the position in the data to one file. The workers meet.

        `more` is saved too: objects with a `state_dict`, such as a scheduler, and plain values, such as an epoch.
        """
        prepared = self._all_prepared("save")
        values = {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in more.items()}
        with self.named("save"), ExitStack() as stack:
            for one in prepared:
                stack.enter_context(one.session.pause())
            driver = {"more": values, "loaders": [loader.position() for loader in self._loaders]}
            try:
                states = [state for one in prepared for state in one.session.gather(driver)]
            except TypeError as error:
                raise UserError(f"team.save: {error}") from None
            if states and self.rank == 0:
                about = self._about() | {"step": prepared[0].session.worker.step}
                checkpoint.write(Path(path), checkpoint.pack(about, states))

    def load(self, path: str | Path, **more: Any) -> dict[str, Any]:
        """Go on from a file that `save` wrote, after `prepare` and `shard`. The workers meet.

        Objects in `more` get the state that was saved under their name. Returns the plain values that were saved.
        """
        prepared = self._all_prepared("load")
        found = None
        if self.worker == 0:
            found = checkpoint.read(Path(path))
            check(Path(path), found.about, self._about())
            found = for_workers(Path(path), found, self._about())
        ranks = self._rank.comm.size
        states = []
        for number, one in enumerate(prepared):
            part = dataclasses.replace(found, states=found.states[number * ranks :][:ranks]) if found else None
            states.append(one.session.load(part))
        prepared[0].session.load_random(states[0])
        driver = states[0]["driver"]
        for loader, position in zip(self._loaders, driver["loaders"], strict=False):
            loader.go_to(*position)
        for name, value in more.items():
            if name not in driver["more"]:
                raise UserError(f"team.load: nothing was saved as {name}; there are: {', '.join(driver['more'])}")
            value.load_state_dict(driver["more"][name])
        return {name: value for name, value in driver["more"].items() if name not in more}

    def state_dict(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        """A prepared model's; where it is split, whole on the first rank of each. None is the one that was prepared
        first. All ranks of a model call it together."""
        for one in self._all_prepared("state_dict"):
            if model is None or model is one.model:
                return dict(one.portion.tensors())
        raise UserError("team.state_dict takes a model that team.prepare returned")

    def _about(self) -> dict[str, Any]:
        """What a checkpoint must agree in with what is trained here."""
        servers, several = self._strategy.server_ranks(), len(self._prepared) > 1
        names = [type(one.optimizer).__name__ for one in self._prepared]
        counts = [one.portion.parameters for one in self._prepared]
        strategy = described(self._strategy)
        if not isinstance(self._compressor, Identity):
            strategy += f" with {text_of(self._compressor)}"
        known = {"strategy": strategy, "workers": self.size, "servers": servers}
        marks = "+".join(one.portion.fingerprint() for one in self._prepared)
        one_or_all = {"optimizer": names, "parameters": counts} if several else {}
        return known | {"optimizer": names[0], "parameters": counts[0], "model": marks} | one_or_all

    def _all_prepared(self, what: str) -> list[Prepared]:
        if not self._prepared:
            raise UserError(f"call team.prepare before team.{what}")
        return self._prepared

    # The end

    def finish(self) -> None:
        """The farewell: the strategy ends, and everyone has one model, which is an ordinary one again."""
        self._check_trained()
        if self.is_server or self._left:
            return
        self._left = True
        if not self._prepared:
            return
        if self._strategy.lockstep:
            self._leave_together()
        before = [one.replica.values.clone() for one in self._prepared]
        for one in self._prepared:
            one.end()
        self._outcome.end(self._prepared, before, self._loaders)
        if self._counter is not None:
            self._counter.close()
        for one in self._prepared:
            with self._rank.clock.paused():
                compare_replicas(one.session, one.replica, "at the end of the block")
            one.release()
        self._outcome.tell(self._name())

    def _check_trained(self) -> None:
        """Who has taken batches to train on, and no step that the strategy knows of, has trained alone."""
        trained = any(loader.trained_on for loader in self._loaders)
        if not trained or self.size == 1 or any(one.session.worker.step for one in self._prepared):
            return
        what = "call team.prepare(model, optimizer)" if not self._prepared else "step with the prepared optimizer"
        raise UserError(
            f"batches of team.shard were trained on, but no step went through the strategy, so each worker trained "
            f"alone; {what}, or iterate under torch.no_grad() where nothing is trained"
        )

    def _leave_together(self) -> None:
        """Where all take their steps together, nobody may leave before the others."""
        steps = self._prepared[0].session.worker.step
        self._rank.status.operation = "the end of the block"
        try:
            with self._rank.clock.free():
                self.meeting.barrier()
        except CommError as error:
            raise UserError(
                f"rank {self.rank} has left the block after {steps} steps, and others have not: every worker must call "
                f"optimizer.step() equally often (was there a break, a return or an exit on one of them?)"
            ) from error

    def result(self) -> Result:
        """What the training came to, as `fit` gives it; when the block has ended."""
        if not self._left:
            raise UserError("team.result() is there when the 'with hocket.join(...)' block has ended")
        if not self._prepared:
            raise UserError("team.result() is of a training; nothing was prepared with team.prepare")
        return self._outcome.result(self._name())

    def _name(self) -> str:
        return Path(sys.argv[0]).stem
