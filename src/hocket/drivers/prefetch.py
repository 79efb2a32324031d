"""Samples that other processes take while this one computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing import get_all_start_methods
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from hocket.core.comm import Comm
from hocket.core.seeds import stream
from hocket.tasks import SampleSet


class _Upcoming(Sampler[list[int]]):
    """The batches to come, in order."""

    def __init__(self, batches: Callable[[], Iterator[Tensor]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return (index.tolist() for index in self._batches())


class Prefetched:
    """A source of batches that are known beforehand: `upcoming` gives them, from the one that is asked for first."""

    def __init__(
        self, samples: SampleSet, loaders: int, upcoming: Callable[[], Iterator[Tensor]], seed: int, rank: int
    ) -> None:
        fork = "fork" if "fork" in get_all_start_methods() else None  # a user's file cannot be imported by its name
        self._loader: DataLoader[Any] = DataLoader(
            samples.samples,  # type: ignore[arg-type]
            batch_sampler=_Upcoming(upcoming),
            num_workers=loaders,
            multiprocessing_context=fork,
            generator=torch.Generator().manual_seed(stream(seed, "loaders", rank)),  # torch's own is the model's
        )
        self._batches: Iterator[Any] = iter(())

    def start(self, workers: Comm) -> None:
        """Start the processes, one worker after the other, when all have come: where workers are threads of one
        process, a fork while another computes or seeds may leave a lock closed in the child for ever."""
        workers.barrier()
        for rank in range(workers.size):
            if rank == workers.rank:
                self._batches = iter(self._loader)
            workers.barrier()

    def take(self, index: Tensor) -> tuple[Any, Any]:
        """The next batch, which must be the one of this index."""
        inputs, targets = next(self._batches)
        assert len(inputs) == len(index), "batches are taken in the order in which they were announced"
        return inputs, targets

    def close(self) -> None:
        """End the processes."""
        self._batches = iter(())
