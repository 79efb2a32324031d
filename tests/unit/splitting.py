"""A model that is split over ranks, beside the same in one piece."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from tiny import on_threads
from torch import Tensor, nn

from hocket.core.comm import Rank
from hocket.core.replica import Replica
from hocket.layouts.mesh import Layout, Mesh
from hocket.layouts.placing import place
from hocket.measure.meter import Metered
from hocket.measure.trace import Trace

LIMIT = {torch.float32: 1e-5, torch.float64: 1e-12}


def loss_of(output: Tensor) -> Tensor:
    """No two outputs have the same part in it."""
    weights = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).view_as(output)
    return (output * weights).sum() / len(output) + output.square().mean()


def whole_gradient(model: nn.Module, x: Any) -> tuple[Tensor, Replica]:
    """The output and, in the replica, the gradient of one process."""
    replica = Replica(copy.deepcopy(model))
    output = replica.model(x)
    loss_of(output).backward()
    return output.detach(), replica


def split_gradient(model: nn.Module, x: Any, ranks: int, layout: str) -> tuple[list[Tensor], Tensor, Tensor, int]:
    """Every rank's output, the gradient and the values put together, and the bytes that all have sent."""

    def main(rank: Rank) -> Any:
        mesh = Mesh(rank.comm, Layout.parse(layout).over(ranks))
        within = Metered(mesh.within, rank.clock, rank.status, Trace(0))
        placed = place(copy.deepcopy(model), mesh, within, torch.device("cpu"))
        output = placed.replica.model(x)
        loss_of(output).backward()
        sent = within.totals.bytes_sent
        found = placed.portion.whole({"replica": placed.replica.values, "kept": {"g": placed.replica.g}})
        return output.detach(), found, sent

    results = on_threads(main, ranks)
    whole = results[0][1]
    return [r[0] for r in results], whole["kept"]["g"], whole["replica"], sum(r[2] for r in results)


def assert_alike(model: nn.Module, x: Any, ranks: int, layout: str) -> None:
    """Outputs, every parameter's gradient and statistics are those of one process."""
    expected, replica = whole_gradient(model, x)
    outputs, gradient, values, _ = split_gradient(model, x, ranks, layout)
    limit = LIMIT[replica.x.dtype]
    for output in outputs:
        assert apart(output, expected) <= limit
    assert apart(gradient, replica.g) <= limit
    for part, same in zip(replica.layout(gradient).values(), replica.layout(replica.g).values(), strict=True):
        size = max(float(same.norm()), float(replica.g.norm()) / 100)  # behind BatchNorm, biases have none but rounding
        assert float((part - same).norm()) <= limit * size
    assert apart(values, replica.values) <= limit


def apart(a: Tensor, b: Tensor) -> float:
    """The distance of two tensors over the size of the second."""
    assert a.shape == b.shape
    return float(((a - b).norm() / b.norm().clamp(min=1e-30)).detach())


def counted(main: Callable[[Rank, Metered], Any], ranks: int) -> list[int]:
    """What each rank sends, in bytes."""

    def metered(rank: Rank) -> int:
        comm = Metered(rank.comm, rank.clock, rank.status, Trace(0))
        main(rank, comm)
        return comm.totals.bytes_sent

    return on_threads(metered, ranks)
