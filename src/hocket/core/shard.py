"""Who trains on which samples: a function of (seed, epoch, rank), the same for every engine and driver."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


class Shards:
    """One global order an epoch, cut into global batches, each shared out between the workers.

    Step k of n workers with batch b covers the very samples of step k of one worker with batch n*b.
    The last global batch may be smaller; it is shared out evenly, and a worker may get nothing of it.
    """

    def __init__(self, samples: int, workers: int, batch: int, seed: int) -> None:
        self.samples, self._workers, self._seed = samples, workers, seed
        self._together = workers * batch
        """Samples of all workers in a full step."""
        self.steps = -(-samples // self._together)
        """Steps an epoch."""

    def global_batch(self, order: Tensor, step: int) -> Tensor:
        return order[step * self._together : (step + 1) * self._together]

    def step_samples(self, step: int) -> int:
        """Samples of all workers together in this step of an epoch."""
        return min(self._together, self.samples - step * self._together)

    def samples_until(self, step: int) -> int:
        """Samples of all workers together until this step of a run."""
        epochs, rest = divmod(step, self.steps)
        return epochs * self.samples + min(rest * self._together, self.samples)

    def order(self, epoch: int) -> Tensor:
        """All samples, shuffled: the same for every worker."""
        return _order(self.samples, self._seed, epoch)

    def batch(self, epoch: int, step: int, share: int) -> Tensor:
        """The sample numbers of one worker's share of a step."""
        least, more = divmod(self.step_samples(step), self._workers)  # the first get one more
        begin = step * self._together + share * least + min(share, more)
        return self.order(epoch)[begin : begin + least + (share < more)]

    def epoch(self, epoch: int, rank: int) -> list[Tensor]:
        """The sample numbers of each of this rank's batches."""
        return [self.batch(epoch, step, rank) for step in range(self.steps)]


@lru_cache(maxsize=2)  # ranks that are threads of one process share it, and are at most an epoch apart
def _order(samples: int, seed: int, epoch: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(samples, generator=generator)
