"""Means of stretches of the parameters, taken while the workers take further steps."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hocket.core.comm import Comm, Request
from hocket.core.state import State
from hocket.core.weight import Weight


class Meanwhile:
    """A stretch leaves as it is at a step, weighted by this worker's samples; its mean is asked for some steps later.

    `sums` and `left` are to be kept: with them a run that was saved meanwhile goes on.
    """

    def __init__(self, x: Tensor, spans: Sequence[slice], comm: Comm) -> None:
        self._x, self._spans, self._comm = x, spans, comm
        self.sums = [x.new_zeros(span.stop - span.start + 1) for span in spans]
        """Of each stretch, and behind it of its samples."""
        self.left = State(at=[0 for _ in spans])
        """The step at which each stretch left, 0 for one that is not under way."""
        self._under_way: dict[int, Request] = {}

    def start(self, number: int, step: int, weight: Weight) -> None:
        samples = 1.0 if weight.of_all == 0 else weight.samples
        sums = self.sums[number]
        sums[:-1].copy_(self._x[self._spans[number]]).mul_(samples)
        sums[-1] = samples
        self.left.at[number] = step
        if self._comm.size > 1:
            self._under_way[number] = self._comm.iall_reduce(sums)

    def mean(self, number: int) -> Tensor:
        """Of a stretch that has left: over all samples of all workers."""
        if number in self._under_way:
            self._under_way.pop(number).wait()
        self.left.at[number] = 0
        sums = self.sums[number]
        assert sums[-1] > 0, "a weighted mean needs a sample"
        return sums[:-1] / sums[-1]

    def settle(self) -> None:
        """Wait for all that is under way, in the order in which it left."""
        for request in self._under_way.values():
            request.wait()
        self._under_way.clear()
