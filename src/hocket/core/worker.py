"""The worker's side of a strategy: what the pseudocode of a paper calls `x`, `step`, `descend`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from hocket.core.buckets import Buckets
from hocket.core.clock import Clock
from hocket.core.collectives import Algorithm, by
from hocket.core.comm import Comm
from hocket.core.hyperparameters import Hyperparameters
from hocket.core.means import Mean, Payload, weighted_mean
from hocket.core.meanwhile import Meanwhile
from hocket.core.message import Seal, as_it_is
from hocket.core.registry import Registry
from hocket.core.replica import Gradient, Part, Replica
from hocket.core.seeds import stream
from hocket.core.serving import Server
from hocket.core.sharing import SharedVector, Sharing
from hocket.core.state import Kept
from hocket.core.weight import Weight

T = TypeVar("T")
Steps = Generator[None, Gradient | None, None]
"""A strategy at work: yields for the gradient at `w.x`, is sent None after the last one."""

Need = Literal["messages", "collectives", "any-source", "polling", "shared-memory"]


class Strategy(ABC):
    """How replicas agree. A strategy is a frozen dataclass whose fields are its options."""

    name: ClassVar[str]
    fewest_workers: ClassVar[int] = 1
    most_workers: ClassVar[int] = 1_000_000_000

    @property
    def needs(self) -> frozenset[Need]:
        """What it asks of an engine."""
        return frozenset()

    @property
    def sends(self) -> bool:
        """Whether gradients or models travel between ranks, and do not lie in memory that all share."""
        return bool(self.needs & {"messages", "collectives"}) and "shared-memory" not in self.needs

    @property
    def sends_early(self) -> bool:
        """Whether it sends while gradients are computed."""
        return False

    @property
    def lockstep(self) -> bool:
        """Whether the workers take their steps together, so that all can meet at the end of an epoch."""
        return True

    threads: int = 1
    """Of PyTorch, that each worker computes an operation with."""

    @property
    def alike(self) -> bool:
        """Whether all replicas have the same parameters after every step."""
        return False

    def server_ranks(self) -> int:
        """How many ranks it needs beside the workers."""
        return 0

    def server(self, s: Server) -> None:
        """The life of a server rank, for a strategy that has any."""
        raise AssertionError(f"{self.name} has no servers")

    def sharing(self, dim: int, workers: int) -> Sharing | None:
        """How a vector of `dim` parameters lies in shared memory, for a strategy that needs it."""
        return None

    def compiled_sharing(
        self, dim: int, workers: int, *, sparse: bool = False, by_rows: bool = False
    ) -> Sharing | None:
        """How compiled workers share the vector; None for a strategy that has no compiled form.

        `sparse`: an update changes only what its samples touch. `by_rows`: workers can tell each other what each adds.
        """
        return self.sharing(dim, workers)

    @property
    def threads_inside(self) -> int:
        """Compiled threads of each worker, which train its replica together; 0 where a worker is one."""
        return 0

    def check(self, workers: int) -> None:  # noqa: B027 - most strategies take any number of workers
        """Refuse options or a number of workers that cannot work, with one line that says what to do."""

    def idle(self) -> Mapping[str, str]:
        """Options that change nothing as the others stand: the name of each, and of the option that makes it so.

        Nobody's name where it never changes anything.
        """
        return {}

    def step_scale(self, workers: int) -> float:
        """How far one sample moves the model that the run returns, over how far it does in a serial run.

        At one learning rate and batch, without tempering. Strategies that average have 1 / workers.
        """
        return 1 / workers

    @abstractmethod
    def worker(self, w: Worker) -> Steps:
        """One worker's life, as the paper's pseudocode has it.

        A run is saved while the workers wait for a gradient: what must outlive a step is local to it, or kept.
        """

    def consensus(self, w: Worker) -> Tensor | None:
        """The parameters that the run would return if it ended now; None is the mean of all replicas."""
        return None

    def part(self, w: Worker) -> tuple[Tensor, float]:
        """Where it is the mean of all replicas: this worker's part in that, and what the part weighs."""
        return w.x, 1.0


strategy: Registry[Strategy] = Registry("strategy", "strategies")


class Worker:
    """One replica and its means to agree with others."""

    def __init__(
        self,
        comm: Comm,
        clock: Clock,
        model: Replica,
        optimizer: torch.optim.Optimizer,
        seed: int,
        optimizer_step: Callable[[], object],
        world: Comm | None = None,
        kept: Kept | None = None,
        served: Callable[[], Tensor] | None = None,
        batch: int | None = None,
        mean: Mean = weighted_mean,
        seal: Seal = as_it_is,
        mixing: float = 1.0,
    ) -> None:
        self.comm, self.clock = comm, clock
        self.world = world or comm
        """The workers, numbered as in `comm`, and the servers behind them."""
        self.rank, self.size = comm.rank, comm.size
        self.model = model
        self.x, self.replica = model.x, model.values
        self.step = 0
        """Gradients taken so far."""
        self.layout = model.layout
        """Named, shaped views of a flat vector, for what needs shapes."""
        self.staleness: Counter[int] = Counter()
        """How many updates had which staleness."""
        self._seed = seed
        self.common_rng = torch.Generator().manual_seed(stream(seed, "strategy"))
        """Draws the same on every worker, for what all must agree on without asking."""
        self.on_part: Callable[[Part], None] | None = None
        """Called as each part of the gradient is complete, while the rest is still computed; see `model.parts`."""
        self.settle: Callable[[], None] = lambda: None
        """Waits for what the strategy has under way, before the run is saved."""
        self.coming = Gradient(model.g, Weight())
        """The gradient that is computed: its weight is known before its parts are."""
        self.seal = seal
        """A vector as the rank that it is sent to will find it, for a strategy that must know that."""
        self.mixing = mixing
        """How far a worker may go towards models that may be lossy, where workers average with a few others."""
        self._mean_of = mean
        self._batch = batch
        self._kept = kept or Kept()
        self._served = served
        self._shared: SharedVector | None = None
        self._optimizer = optimizer
        self._hyperparameters = Hyperparameters(optimizer)
        self._optimizer_step = optimizer_step

    @cached_property
    def rng(self) -> torch.Generator:
        """This worker's own randomness."""
        return torch.Generator().manual_seed(stream(self._seed, "strategy", self.rank))

    def keep(self, name: str, value: T) -> T:
        """Give a name to what outlives a step: a tensor, a container or a `State`, changed in place from now on.

        So it is saved with the run, and comes back as it was when the run goes on.
        """
        return self._kept.keep(name, value)

    def kept(self, name: str) -> Any:
        """What was given this name."""
        return self._kept.values[name]

    @property
    def has_shared(self) -> bool:
        return self._shared is not None

    @property
    def shared(self) -> SharedVector:
        """The vector that all workers share, for a strategy that needs shared memory, and for compiled workers."""
        assert self._shared is not None, "nobody asked for shared memory"
        return self._shared

    @shared.setter
    def shared(self, shared: SharedVector) -> None:
        self._shared = shared

    def served(self) -> Tensor:
        """The parameters as the servers hold them now, for a strategy that has servers."""
        assert self._served is not None, "the strategy has no servers"
        return self._served()

    @property
    def lr(self) -> float:
        """The learning rate of this step."""
        return max(float(group["lr"]) for group in self._optimizer.param_groups)

    @property
    def momentum(self) -> float:
        """The optimizer's, at this step; 0 where it has none."""
        return max(float(group.get("momentum", 0.0)) for group in self._optimizer.param_groups)

    def hyperparameters(self, momentum_elsewhere: bool = False) -> Tensor:
        """The optimizer's rate, momentum and so on at this step, for who steps in the worker's place."""
        return self._hyperparameters.told(momentum_elsewhere)

    def portion(self, g: Gradient) -> float:
        """What a gradient counts that is applied by itself, not in a mean: its samples over those of a full batch.

        1 where a full batch is not known, as in a loop of the user's own, and for one worker alone: as in a serial run.
        """
        return 1.0 if self._batch is None or self.size == 1 else g.samples / self._batch

    def descend(self, g: Gradient, stale: int = 0) -> None:
        """One step of the optimizer along `g`. No samples, no step: momentum and decay rest too.

        `stale` is how many updates came between the read that `g` was computed at and this one.
        """
        if g.samples == 0:
            return
        if g.vector is not self.model.g:
            self.model.g.copy_(g.vector)
        self.staleness[stale] += 1
        self._optimizer_step()

    def average(self, g: Gradient, algorithm: Algorithm = "auto") -> None:
        """Replace `g` by the mean over all samples of all workers: sum |B_i| g_i / sum |B_i|."""
        payload = Payload(lossy=(g.vector,), residual="gradient")
        total = self._mean(payload, g.weight, self.model.gradient_count, algorithm=algorithm)
        g.weight = Weight(total, total)

    def average_in_buckets(self, nbytes: int, algorithm: Algorithm = "auto") -> Callable[[Gradient], None]:
        """Have gradients averaged in buckets of so many bytes (0: as suits the model), each as soon as it is complete.
        What is returned waits for the last of them, and then does to a gradient what `average` does. All workers call
        it together."""
        if self.size == 1:
            return self.average
        with self.clock.paused():
            comm = self.comm.native if algorithm == "native" else self.comm
            buckets = Buckets(self.model, comm.background(), nbytes)
        self.on_part = lambda part: buckets.complete(part, self.coming.weight)
        return buckets.average

    def average_replicas(
        self,
        weight: Weight | float = 1.0,
        comm: Comm | None = None,
        since: Tensor | None = None,
        span: slice | None = None,
    ) -> None:
        """Replace every replica by their mean, each weighted by the samples it has seen since the last one.

        A plain number is this worker's weight alone: what all have together is asked for. `comm` is a part of the
        workers that averages by itself; without it, all do. `since` is a model that all set out from alike; without
        it, that is what they last averaged to. `span` is the part of the parameters that is averaged; the buffers go
        with the last.
        """
        comm = comm or self.comm
        span = span or slice(0, self.x.numel())
        is_last = span.stop == self.x.numel()
        exact, name = (self.model.buffers,) if is_last else (), f"replica/{span.start}"
        payload = Payload((self.x[span],), exact, name, is_model=True, since=None if since is None else since[span])
        self._mean(payload, weight if isinstance(weight, Weight) else Weight(weight, None), self.model.count, comm)
        if is_last:
            self._average_odd_buffers(comm)

    def average_meanwhile(self, spans: Sequence[slice]) -> Meanwhile:
        """For means of stretches of the parameters while this worker goes on. All workers call it together."""
        with self.clock.paused():
            meanwhile = Meanwhile(self.x, spans, self.comm if self.size == 1 else self.comm.background())
        self.keep("meanwhile/sums", meanwhile.sums)
        self.keep("meanwhile/left", meanwhile.left)
        self.settle = meanwhile.settle
        return meanwhile

    def average_buffers(self, algorithm: Algorithm = "auto") -> None:
        """Give all replicas the same BatchNorm statistics."""
        payload = Payload(exact=(self.model.buffers,))
        self._mean(payload, Weight(1.0, self.size), self.model.count, algorithm=algorithm)
        self._average_odd_buffers(self.comm)

    def _average_odd_buffers(self, comm: Comm) -> None:
        for buffer in self.model.odd_buffers:
            comm.all_reduce(buffer, "mean")

    def _mean(
        self,
        payload: Payload,
        weight: Weight,
        count: Tensor,
        comm: Comm | None = None,
        algorithm: Algorithm = "auto",
    ) -> float:
        comm = comm or self.comm
        all_reduce = comm.all_reduce if algorithm == "auto" else partial(by, algorithm, comm)
        return self._mean_of(payload, weight, comm, all_reduce, count)

    def optimizer_state(self) -> Sequence[Tensor]:
        """The optimizer's vectors, such as momentum: what is as long as a parameter."""
        return [
            value
            for state in self._optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.dim() > 0
        ]

    def reset_optimizer(self) -> None:
        """Forget all that the optimizer has gathered; its count of steps too, which says how much that is."""
        self._optimizer.state.clear()
