"""The batches of one worker in a loop that is the user's own, and where in them it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from hocket.core.comm import Comm, Counter
from hocket.core.errors import UserError, shown
from hocket.core.seeds import seeded, stream
from hocket.core.shard import Shards


class Counts(Protocol):
    """Who wants to know how many samples a batch counts for."""

    def saw(self, samples: int) -> None: ...
    def forget(self) -> None: ...
    def tickets(self, given: int) -> Tickets | None:
        """What tickets for batches are drawn from, some of them given out before; None where every worker has its
        share of each step. All workers ask as often, each when it gets there."""


PASSES = 1024
"""Loaders of a run that may give batches where workers do not wait for each other."""


@dataclass(frozen=True)
class Tickets:
    """Numbers from `first` on that workers draw, each of them once. Of an `ensemble`, the ranks that are one worker,
    the first draws for all."""

    counter: Counter
    number: int
    first: int
    ensemble: Comm | None = None

    def take(self, count: int = 1) -> int:
        if self.ensemble is None:
            return self.first + self.counter.take(count, self.number)
        taken = torch.tensor(self.counter.take(count, self.number))
        self.ensemble.broadcast(taken)
        return self.first + int(taken)


class OwnShards(Shards):
    """Shards in the order that the user has chosen: shuffled, as it is, or a sampler's."""

    def __init__(
        self, dataset: Sized, workers: int, batch: int, seed: int, sampler: Any, shuffle: bool, drop_last: bool
    ) -> None:
        self._all = len(dataset) if sampler is None else len(sampler)
        whole = self._all // (workers * batch) * workers * batch
        super().__init__(whole if drop_last else self._all, workers, batch, seed)
        self._own_seed, self._sampler, self._shuffle = seed, sampler, shuffle
        self._drawn: tuple[int, Tensor] = (-1, torch.empty(0))

    def order(self, epoch: int) -> Tensor:
        if self._sampler is None and self._shuffle and self._all == self.samples:
            return super().order(epoch)
        if self._drawn[0] != epoch:
            self._drawn = (epoch, self._draw(epoch)[: self.samples])
        return self._drawn[1]

    def _draw(self, epoch: int) -> Tensor:
        """The same on every worker."""
        if self._sampler is None:
            generator = torch.Generator().manual_seed(stream(self._own_seed, "order", epoch))
            return torch.randperm(self._all, generator=generator) if self._shuffle else torch.arange(self._all)
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        with seeded(stream(self._own_seed, "sampler", epoch)):
            return torch.tensor(list(self._sampler), dtype=torch.int64)


class ShardSampler(Sampler[list[int]]):
    """This rank's batches of one epoch: its share of each step from some step on, or those that it draws a ticket
    for. `weights` gets the samples that each batch counts for, in the order in which they are given out."""

    def __init__(self, shards: Shards, workers: int, rank: int, batch_size: int) -> None:
        self.shards, self._workers, self._rank, self._batch_size = shards, workers, rank, batch_size
        self.epoch, self.first = -1, 0
        self.tickets: Tickets | None = None
        self.ticket = -1
        """One that was drawn and not used: it belongs to a later epoch."""
        self.weights: list[int] = []

    def __len__(self) -> int:
        return self.shards.steps

    def __iter__(self) -> Iterator[list[int]]:
        self.weights.clear()
        return self._shares() if self.tickets is None else self._drawn(self.tickets)

    def _shares(self) -> Iterator[list[int]]:
        """Where the last global batch has nothing for this rank it computes on a stand-in that counts for nothing: the
        step still needs it to take part."""
        stand_in = self.shards.order(self.epoch)[: self._batch_size]
        for step in range(self.first, self.shards.steps):
            batch = self.shards.batch(self.epoch, step, self._rank)
            self.weights.append(len(batch))
            yield (batch if len(batch) else stand_in).tolist()

    def _drawn(self, tickets: Tickets) -> Iterator[list[int]]:
        """Whatever nobody else has taken: who is fast takes more, and who is late may find nothing of an epoch left.
        Who begins an epoch takes away what is left of the one before."""
        an_epoch = self.shards.steps * self._workers
        while True:
            if self.ticket < 0:
                self.ticket = tickets.take()
            epoch, place = divmod(self.ticket, an_epoch)
            if epoch > self.epoch:
                return
            self.ticket = -1
            batch = self.shards.batch(epoch, *divmod(place, self._workers))
            if epoch == self.epoch and len(batch):
                self.weights.append(len(batch))
                yield batch.tolist()


class ShardLoader(DataLoader[Any]):
    """A DataLoader that says how many samples each batch counts for, and can begin in the middle of an epoch."""

    def __init__(
        self, counts: Counts, dataset: Dataset[Any], sampler: ShardSampler, seed: int, options: dict[str, Any]
    ) -> None:
        # A DataLoader draws a number for each pass: the model's generator must not hear of it, as a run that goes on in
        # the middle of an epoch begins one pass more.
        self._own_generator = None if options.get("generator") else torch.Generator()
        if self._own_generator:
            options["generator"] = self._own_generator
        super().__init__(dataset, batch_sampler=sampler, **options)
        self._counts, self._shard_sampler, self._seed = counts, sampler, seed
        self._step = self._given = 0
        self._goes_on = False
        self._tickets: Tickets | None = None
        self.trained_on = False
        """Whether batches were taken while gradients were wanted."""

    def position(self) -> tuple[int, int, int, int]:
        """The epoch, how many of its batches were given out, a ticket in hand, and all tickets so far."""
        given = self._tickets.take(0) if self._tickets else self._given
        return self._shard_sampler.epoch, self._step, self._shard_sampler.ticket, given

    def go_to(self, epoch: int, step: int, ticket: int, given: int) -> None:
        """The next pass begins there."""
        sampler = self._shard_sampler
        self._goes_on = step < len(sampler)
        sampler.epoch, self._step, sampler.ticket = epoch, step, ticket
        self._tickets, self._given = None, given

    def set_epoch(self, epoch: int) -> None:
        """The next pass is this epoch's."""
        if not isinstance(epoch, int) or epoch < 0:
            raise UserError(f"set_epoch takes a whole number from 0 on, got {shown(epoch)}")
        if not (self._goes_on and self._shard_sampler.epoch == epoch):
            self._goes_on = False
            self._shard_sampler.epoch = epoch - 1

    @property
    def epochs(self) -> float:
        """Passes so far."""
        sampler = self._shard_sampler
        return max(sampler.epoch, 0) + self._step / max(len(sampler), 1)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        sampler = self._shard_sampler
        training = torch.is_grad_enabled()  # validation counts for no gradient
        if not self._goes_on:
            sampler.epoch, self._step = sampler.epoch + 1, 0
        self._goes_on, sampler.first = False, self._step
        if self._own_generator is not None:
            self._own_generator.manual_seed(stream(self._seed, "loading", max(sampler.epoch, 0)))
        if training and self._tickets is None:
            self._tickets = self._counts.tickets(self._given)
        sampler.tickets = self._tickets if training else None
        if training:
            self._counts.forget()  # nor does a batch that was taken and not used
        for number, batch in enumerate(super().__iter__()):
            if training:
                self.trained_on = True
                self._counts.saw(sampler.weights[number])
            self._step += 1
            yield batch
        self._step = len(sampler)  # where batches are drawn, a worker may have had fewer


class StreamShare(IterableDataset[Any]):
    """This rank's batches of a stream, each with the samples that it counts for.

    Every rank reads the whole stream and keeps its share of each global batch, so that all have equally many, and the
    last one is shared out too.
    """

    def __init__(self, stream: IterableDataset[Any], workers: int, rank: int, batch: int, collate: Any) -> None:
        self._stream, self._workers, self._rank, self._batch, self._collate = stream, workers, rank, batch, collate

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        gathered: list[Any] = []
        for sample in self._stream:
            gathered.append(sample)
            if len(gathered) == self._workers * self._batch:
                yield self._share(gathered)
                gathered = []
        if gathered:
            yield self._share(gathered)

    def _share(self, gathered: list[Any]) -> tuple[Any, int]:
        mine = torch.arange(len(gathered)).tensor_split(self._workers)[self._rank].tolist()
        return self._collate([gathered[i] for i in mine] if mine else gathered[:1]), len(mine)


class StreamLoader:
    """Batches of an IterableDataset for one worker."""

    def __init__(self, counts: Counts, share: StreamShare, options: dict[str, Any]) -> None:
        self._counts = counts
        self._loader: DataLoader[Any] = DataLoader(share, batch_size=None, **options)
        self.trained_on = False
        self.epochs = 0.0

    def position(self) -> tuple[int, int, int, int]:
        """A stream cannot be entered in the middle: the passes that are complete."""
        return int(self.epochs), 0, -1, 0

    def go_to(self, epoch: int, step: int, ticket: int, given: int) -> None:
        self.epochs = float(epoch)

    def set_epoch(self, epoch: int) -> None:
        self.epochs = float(epoch)

    def __iter__(self) -> Iterator[Any]:
        training = torch.is_grad_enabled()
        if training:
            self._counts.forget()
        for batch, samples in self._loader:
            if training:
                self.trained_on = True
                self._counts.saw(samples)
            yield batch
        self.epochs += 1


Loader = ShardLoader | StreamLoader


def make_loader(
    counts: Counts, dataset: Any, batch_size: int, workers: int, rank: int, seed: int, options: dict[str, Any]
) -> Loader:
    """A worker's loader; what no loader can do is refused in one line."""
    if "batch_sampler" in options:
        raise UserError("team.shard makes the batches itself; give it a sampler and batch_size, not a batch_sampler")
    if isinstance(dataset, DataLoader):
        raise UserError("team.shard makes the DataLoader: give it the dataset, and batch_size, sampler and so on")
    if not isinstance(batch_size, int) or isinstance(batch_size, bool):
        raise UserError(f"team.shard: batch_size must be a whole number, got {shown(batch_size)}")
    if unknown := options.keys() - inspect.signature(DataLoader).parameters.keys():
        raise UserError(f"team.shard: a DataLoader has no option {min(unknown)}")
    if isinstance(dataset, IterableDataset):
        return _stream_loader(counts, dataset, batch_size, workers, rank, options)
    if not hasattr(dataset, "__len__"):
        raise UserError("team.shard needs a dataset with a length, or an IterableDataset")
    sampler = options.pop("sampler", None)
    shuffle, drop_last = options.pop("shuffle", sampler is None), options.pop("drop_last", False)
    if sampler is not None and shuffle:
        raise UserError("team.shard takes a sampler or shuffle=True, not both")
    if sampler is not None and not hasattr(sampler, "__len__"):
        raise UserError("team.shard needs a sampler with a length")
    samples = len(dataset if sampler is None else sampler)
    if not 1 <= batch_size <= samples // workers:
        raise UserError(
            f"batch_size must be between 1 and a worker's shard of {samples // workers} samples, got {batch_size}"
        )
    shards = OwnShards(dataset, workers, batch_size, seed, sampler, bool(shuffle), bool(drop_last))
    mine = ShardSampler(shards, workers, rank, batch_size)
    return ShardLoader(counts, dataset, mine, stream(seed, "loader", rank), options)


def _stream_loader(
    counts: Counts, dataset: IterableDataset[Any], batch_size: int, workers: int, rank: int, options: dict[str, Any]
) -> StreamLoader:
    for name in ("shuffle", "sampler", "drop_last"):
        if options.pop(name, None):
            raise UserError(f"an IterableDataset comes in an order of its own; leave {name} out")
    if options.get("num_workers", 0) > 1:
        raise UserError("an IterableDataset is read by one loading process a worker; use num_workers=1 or 0")
    if batch_size < 1:
        raise UserError(f"batch_size must be 1 or more, got {batch_size}")
    collate: Callable[[list[Any]], Any] = options.pop("collate_fn", None) or default_collate
    return StreamLoader(counts, StreamShare(dataset, workers, rank, batch_size, collate), options)
