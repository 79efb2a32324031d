"""The mean of a gradient, taken in buckets while the rest of it is computed (Li 2020, PyTorch DDP)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch

from hocket.core.comm import Comm, Request
from hocket.core.replica import Gradient, Part, Replica
from hocket.core.weight import Weight

FIRST_SHARE = 8
"""The first bucket is this much smaller than the others, so that something leaves soon."""
SMALLEST, LARGEST = 16 << 10, 1 << 20
"""Bytes of buckets whose size nobody has said."""


class Buckets:
    """Stretches of the flat gradient in the order in which the way back completes them, the same on all ranks.

    A bucket leaves when all of it is complete, and all before it have left. It is summed beside the gradient, which
    stays as it is until `average`. Where the samples of all workers are not known, the first bucket, which is the end
    of the gradient, brings them.
    """

    def __init__(self, replica: Replica, comm: Comm, nbytes: int) -> None:
        self._g, self._comm = replica.g, comm
        self._spans = {part.number: span for part, span in in_buckets(replica, nbytes)}
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
        factor = weight.samples if weight.of_all is None else weight.relative(self._comm.size)
        torch.mul(self._g[span], factor, out=self._sums[span])
        sent = self._sums[span]
        if weight.of_all is None and span.stop == self._g.numel():
            self._count.fill_(weight.samples)
            sent = self._sums[span.start :]
        self._under_way.append((span, self._comm.iall_reduce(sent)))

    def average(self, g: Gradient) -> None:
        """Wait for all buckets, and replace `g` by the mean over all samples of all workers."""
        assert len(self._under_way) == len(self._spans), "every part of a gradient is announced"
        total = known = self._weight.of_all
        for span, request in self._under_way:
            request.wait()
            total = float(self._count) if total is None else total
            assert total > 0, "a weighted mean needs a sample"
            torch.div(self._sums[span], total if known is None else self._comm.size, out=g.vector[span])
        self._under_way.clear()
        assert total is not None
        g.weight = Weight(total, total)


def in_buckets(replica: Replica, nbytes: int) -> Iterator[tuple[Part, slice]]:
    """The last part of each bucket, and the stretch that the bucket is: as many layers as have room in it, or one that
    is larger. The parameters of a layer are complete together, so that they stay together."""
    wanted = (nbytes or _fitting(replica)) // replica.g.element_size()
    room, end, last = wanted // FIRST_SHARE, replica.g.numel(), replica.parts[-1]
    begin = end
    for _, found in groupby(replica.parts, key=lambda part: replica.names[-1 - part.number].rpartition(".")[0]):
        layer = list(found)
        if begin < end and end - layer[-1].span.start > room:
            yield last, slice(begin, end)
            room, end = wanted, begin
        last, begin = layer[-1], layer[-1].span.start
    yield last, slice(begin, end)


def _fitting(replica: Replica) -> int:
    """Bytes of a bucket, where nobody has said it: few buckets, but not less than is worth a message."""
    return min(max(replica.g.nbytes // 8, SMALLEST), LARGEST)
