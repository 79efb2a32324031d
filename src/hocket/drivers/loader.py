"""The batches of one worker in a loop that is the user's own, and where in them it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from hocket.core.shard import Shards


class Counts(Protocol):
    """Who wants to know how many samples a batch counts for."""

    def saw(self, samples: int) -> None: ...
    def forget(self) -> None: ...


class ShardSampler(Sampler[list[int]]):
    """This rank's batches of one epoch, from some step on."""

    def __init__(self, shards: Shards, rank: int, batch_size: int) -> None:
        self._shards, self._rank, self._batch_size = shards, rank, batch_size
        self.epoch, self.first = -1, 0
        self.weights: list[int] = []

    def __len__(self) -> int:
        return self._shards.steps

    def __iter__(self) -> Iterator[list[int]]:
        batches = self._shards.epoch(self.epoch, self._rank)
        # Where the last global batch has nothing for this rank it computes on a stand-in that counts for nothing:
        # the step still needs it to take part.
        stand_in = self._shards.order(self.epoch)[: self._batch_size]
        self.weights[:] = [len(b) for b in batches]
        return iter([(b if len(b) else stand_in).tolist() for b in batches[self.first :]])


class ShardLoader(DataLoader[Any]):
    """A DataLoader that says how many samples each batch counts for, and can begin in the middle of an epoch."""

    def __init__(
        self, counts: Counts, dataset: Dataset[Any], shards: Shards, rank: int, batch_size: int, options: dict[str, Any]
    ) -> None:
        sampler = ShardSampler(shards, rank, batch_size)
        super().__init__(dataset, batch_sampler=sampler, **options)
        self._counts, self._shard_sampler = counts, sampler
        self._step = 0
        self._goes_on = False

    def position(self) -> tuple[int, int]:
        """The epoch, and how many of its batches were given out."""
        return self._shard_sampler.epoch, self._step

    def go_to(self, epoch: int, step: int) -> None:
        """The next pass begins there."""
        self._goes_on = step < len(self._shard_sampler)
        self._shard_sampler.epoch, self._step = epoch, step

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        sampler = self._shard_sampler
        if not self._goes_on:
            sampler.epoch, self._step = sampler.epoch + 1, 0
        self._goes_on, sampler.first = False, self._step
        training = torch.is_grad_enabled()  # validation counts for no gradient
        if training:
            self._counts.forget()  # nor does a batch that was taken and not used
        for batch in super().__iter__():
            if training:
                self._counts.saw(sampler.weights[self._step])
            self._step += 1
            yield batch
