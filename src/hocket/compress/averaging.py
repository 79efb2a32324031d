"""Weighted means whose lossy part travels encoded, by what suits the compressor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hocket.compress.memory import Memory, check_finite, plain
from hocket.compress.powersgd import PowerSGD, as_matrix, orthogonal
from hocket.core.comm import Comm
from hocket.core.means import Payload, Reduce, weighted_mean
from hocket.core.message import Message
from hocket.core.seeds import stream
from hocket.core.weight import Weight

_TAG = 7003  # apart from a strategy's own messages


class CompressedMeans:
    """Takes means as `weighted_mean` does. All ranks end with the same bits: they decode the same bytes.

    Each rank's share in the mean is what is encoded, so that the memory of what was lost is in units of the mean.
    """

    def __init__(
        self, memory: Memory, start: Tensor, shapes: Sequence[torch.Size], optimizer: torch.optim.Optimizer
    ) -> None:
        self._memory, self._shapes, self._optimizer = memory, shapes, optimizer
        memory.vectors["anchor/start"] = start.detach().clone()

    def __call__(self, payload: Payload, weight: Weight, comm: Comm, all_reduce: Reduce, count: Tensor) -> float:
        if not payload.lossy or comm.size == 1 or self._memory.exactly:
            return weighted_mean(payload, weight, comm, all_reduce, count)
        if weight.of_all == 0:
            weight = Weight(1.0, comm.size)
        total = weighted_mean(Payload(exact=payload.exact), weight, comm, all_reduce, count)
        share = weight.samples * comm.size / total
        momentum = 0.0 if payload.is_model else self._momentum()
        (x,) = payload.lossy
        anchor = self._anchor(comm.size) if payload.is_model and payload.since is None else payload.since
        change = (x if anchor is None else x - anchor) * share
        mean = self._mean(change, payload.residual, comm, all_reduce, momentum)
        x.copy_(mean if anchor is None else anchor + mean)
        if payload.is_model and payload.since is None:
            self._met(comm.size, x)
        return total

    def _momentum(self) -> float:
        """What moves from the optimizer into the memory of a compressor that holds it, so that it counts once."""
        groups = self._optimizer.param_groups
        if self._memory.scheme.takes_momentum and _has_plain_momentum(self._optimizer):
            self._memory.counts.momentum = groups[0]["momentum"]
            for group in groups:
                group["momentum"] = 0.0
        return float(self._memory.counts.momentum)

    def _anchor(self, size: int) -> Tensor:
        """The last mean of so many ranks, or of more: what all of them have."""
        vectors = self._memory.vectors
        return vectors.get(f"anchor/{size}", vectors["anchor/start"])

    def _met(self, size: int, x: Tensor) -> None:
        vectors = self._memory.vectors
        smaller = {int(name.removeprefix("anchor/")) for name in vectors if name[7:].isdecimal() and name[0] == "a"}
        for other in {size, *(s for s in smaller if s < size)}:
            vectors[f"anchor/{other}"] = x.clone()

    def _mean(self, x: Tensor, name: str, comm: Comm, all_reduce: Reduce, momentum: float) -> Tensor:
        match self._memory.scheme.travels:
            case "gathered":
                return self._gathered(x, name, comm, momentum)
            case "scattered":
                return self._scattered(x, name, comm)
            case "factored":
                return self._factored(x, name, comm, all_reduce)

    # Sparse: everyone gets everyone's bytes

    def _gathered(self, x: Tensor, name: str, comm: Comm, momentum: float) -> Tensor:
        block, _ = self._memory.encode(name, x, momentum, comm.size)
        total = torch.zeros(x.numel())
        fixed = self._memory.scheme.size(x.numel()) is not None
        for other in all_blocks(comm, block, block.numel() if fixed else None):
            self._memory.scheme.add_to(total, other)
        return (total / comm.size).to(x.device, x.dtype)

    # Quantized: each rank sums one chunk, and sends it on encoded again

    def _scattered(self, x: Tensor, name: str, comm: Comm) -> Tensor:
        memory, scheme, me = self._memory, self._memory.scheme, comm.rank
        check_finite(x, scheme, name)
        with memory.spans("encode"):
            wanted = scheme.before(memory.vectors, name, x, 0.0, comm.size)
            blocks = [scheme.encode(plain(chunk), memory.draw()) for chunk in wanted.tensor_split(comm.size)]
            chunks = x.tensor_split(comm.size)
            sent = [memory.decode(block, chunk) for block, chunk in zip(blocks, chunks, strict=True)]
            scheme.after(memory.vectors, name, wanted, torch.cat(sent))
        others = [r for r in range(comm.size) if r != me]
        sending = [comm.isend(r, Message("chunk", (), (blocks[r],)), _TAG) for r in others]
        arrived = {r: memory.decode(comm.recv(r, _TAG)[1].tensors[0], chunks[me]) for r in others} | {me: sent[me]}
        for request in sending:
            request.wait()
        mean = torch.stack([arrived[r] for r in range(comm.size)]).sum(0) / comm.size
        block, _ = memory.encode(f"{name}/mean/{comm.size}", mean)
        size = max(scheme.size(chunk.numel()) or 0 for chunk in chunks)
        found = all_blocks(comm, torch.cat([block, block.new_zeros(size - block.numel())]), size)
        return torch.cat([memory.decode(part, chunk) for part, chunk in zip(found, chunks, strict=True)])

    # PowerSGD: sums of factors

    def _factored(self, x: Tensor, name: str, comm: Comm, all_reduce: Reduce) -> Tensor:
        """P = M Q, its mean made orthogonal, Q = M^T P, its mean; M^ = P Q^T (algorithm 1)."""
        memory, scheme = self._memory, self._memory.scheme
        assert isinstance(scheme, PowerSGD)
        check_finite(x, scheme, name)
        wanted = scheme.before(memory.vectors, name, x, 0.0, comm.size)
        spans = self._layers(wanted)
        layers = [t.view(as_matrix(t.shape)) for t in spans if scheme.helps(t.shape)]
        rest = [t.reshape(-1) for t in spans if not scheme.helps(t.shape)]
        rights = [self._right(name, i, layer, scheme.rank) for i, layer in enumerate(layers)]
        with memory.spans("encode"):
            lefts = [layer @ q for layer, q in zip(layers, rights, strict=True)]
        summed = _mean_of([*lefts, *rest], all_reduce)
        lefts, rest = [orthogonal(p) for p in summed[: len(layers)]], summed[len(layers) :]
        rights = _mean_of([m.T @ p for m, p in zip(layers, lefts, strict=True)], all_reduce)
        for i, q in enumerate(rights):
            memory.vectors[f"{name}/right/{i}"] = q
        products, exact = iter([p @ q.T for p, q in zip(lefts, rights, strict=True)]), iter(rest)
        mean = torch.cat([next(products if scheme.helps(t.shape) else exact).reshape(-1) for t in spans])
        own = iter([p @ (m.T @ p).T for m, p in zip(layers, lefts, strict=True)])
        sent = torch.cat([(next(own) if scheme.helps(t.shape) else t).reshape(-1) for t in spans])
        scheme.after(memory.vectors, name, wanted, sent)
        return mean

    def _layers(self, x: Tensor) -> list[Tensor]:
        """The layers of a whole model; of a part of one, rows of equal length and what is left."""
        shapes, n = self._shapes, x.numel()
        if n != sum(shape.numel() for shape in shapes):
            columns = max(1, math.isqrt(n))
            shapes = [torch.Size([n // columns, columns]), torch.Size([n % columns])]
        parts = torch.split(x, [shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _right(self, name: str, i: int, layer: Tensor, rank: int) -> Tensor:
        """The factor that the last step left, the same on all ranks, as is the first."""
        found = self._memory.vectors.get(f"{name}/right/{i}")
        if found is not None:
            return found
        generator = torch.Generator().manual_seed(stream(0, f"powersgd/{name}", i))
        return torch.randn(layer.shape[1], rank, generator=generator).to(layer.device, layer.dtype)


def _has_plain_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's velocity is a sum of gradients and nothing else, faded by one number."""
    groups = optimizer.param_groups
    if not isinstance(optimizer, torch.optim.SGD) or len({group["momentum"] for group in groups}) > 1:
        return False
    others = ("nesterov", "dampening", "weight_decay")
    return bool(groups[0]["momentum"]) and not any(group[name] for group in groups for name in others)


def _mean_of(tensors: list[Tensor], all_reduce: Reduce) -> list[Tensor]:
    """The means of several tensors, taken as one vector."""
    if not tensors:
        return []
    flat = torch.cat([t.reshape(-1) for t in tensors])
    all_reduce(flat, "mean")
    parts = torch.split(flat, [t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def all_blocks(comm: Comm, block: Tensor, size: int | None = None) -> list[Tensor]:
    """Every rank's bytes. Where they may differ in length, the ranks agree on the longest first."""
    if size is None:
        longest = torch.tensor([block.numel()])
        comm.all_reduce(longest, "max")
        size = int(longest)
        block = torch.cat([block, block.new_zeros(size - block.numel())])
    found = block.new_empty(size * comm.size)
    comm.all_gather(found, block)
    return [part.clone() for part in torch.split(found, size)] if size else [block] * comm.size
