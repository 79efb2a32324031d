"""The mean of a gradient, taken in buckets while the rest of it is computed (Li 2020, PyTorch DDP)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hocket.core.comm import Comm, Request
from hocket.core.replica import Gradient, Part, Replica
from hocket.core.weight import Weight

FIRST_SHARE = 8
"""The first bucket is this much smaller than the others, so that something leaves soon."""


class Buckets:
    """Stretches of the flat gradient in the order in which the way back completes them, the same on all ranks.

    A bucket leaves when all of it is complete, and all before it have left. It is summed beside the gradient, which
    stays as it is until `average`. Where the samples of all workers are not known, the first bucket, which is the end
    of the gradient, brings them.
    """

    def __init__(self, replica: Replica, comm: Comm, nbytes: int) -> None:
        self._g, self._comm = replica.g, comm
        self._spans = {part.number: span for part, span in in_buckets(replica.parts, nbytes // self._g.element_size())}
        self._sums = replica.g.new_zeros(replica.g.numel() + 1)
        self._count = self._sums[-1:]
        self._weight = Weight()
        self._under_way: list[tuple[slice, Request]] = []

    def complete(self, part: Part, weight: Weight) -> None:
        """Parts are complete in their order. With the last one of a bucket, the bucket leaves."""
        span = self._spans.get(part.number)
        if span is None:
            return
        self._weight = weight = Weight(1.0, self._comm.size) if weight.of_all == 0 else weight
        torch.mul(self._g[span], weight.samples, out=self._sums[span])
        sent = self._sums[span]
        if weight.of_all is None and span.stop == self._g.numel():
            self._count.fill_(weight.samples)
            sent = self._sums[span.start :]
        self._under_way.append((span, self._comm.iall_reduce(sent)))

    def average(self, g: Gradient) -> None:
        """Wait for all buckets, and replace `g` by the mean over all samples of all workers."""
        assert len(self._under_way) == len(self._spans), "every part of a gradient is announced"
        total = self._weight.of_all
        for span, request in self._under_way:
            request.wait()
            total = float(self._count) if total is None else total
            assert total > 0, "a weighted mean needs a sample"
            torch.div(self._sums[span], total, out=g.vector[span])
        self._under_way.clear()
        assert total is not None
        g.weight = Weight(total, total)


def in_buckets(parts: Sequence[Part], elements: int) -> Iterator[tuple[Part, slice]]:
    """The last part of each bucket, and the stretch that the bucket is. A part is never split."""
    end, wanted = parts[0].span.stop, elements // FIRST_SHARE
    for part in parts:
        begin = part.span.start
        if end - begin >= wanted or part is parts[-1]:
            yield part, slice(begin, end)
            end, wanted = begin, elements
