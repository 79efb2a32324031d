"""What communication costs under batch, model, domain and integrated parallelism (Gholami 2018), for AlexNet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hocket.report.figures import Axis, Figure, Series

ALPHA_S = 2e-6
"""Of a message."""
BETA_S = 4 / 6e9
"""Of a value of 4 bytes, at 6 GB/s."""
BATCH = 2048


@dataclass(frozen=True)
class Layer:
    """Y = W X: values of X and Y of one sample, weights, and what a halo holds at the edges of either."""

    inputs: int
    outputs: int
    weights: int
    halo_in: int
    halo_out: int

    @classmethod
    def convolution(cls, side_in: int, channels_in: int, side: int, channels: int, kernel: int) -> Layer:
        weights = kernel * kernel * channels_in * channels
        halos = side_in * channels_in * (kernel // 2), side * channels * (kernel // 2)
        return cls(side_in**2 * channels_in, side**2 * channels, weights, *halos)

    @classmethod
    def dense(cls, inputs: int, outputs: int) -> Layer:
        return cls(inputs, outputs, inputs * outputs, inputs, outputs)  # all of its input is halo


CONVOLUTIONS = (
    Layer.convolution(227, 3, 55, 96, 11),
    Layer.convolution(27, 96, 27, 256, 5),
    Layer.convolution(13, 256, 13, 384, 3),
    Layer.convolution(13, 384, 13, 384, 3),
    Layer.convolution(13, 384, 13, 256, 3),
)
DENSE = (Layer.dense(9216, 4096), Layer.dense(4096, 4096), Layer.dense(4096, 1000))
ALEXNET = (*CONVOLUTIONS, *DENSE)


def _once(ranks: int, values: float) -> float:
    """Gather so many values over the ranks, each of which has its share."""
    return ALPHA_S * math.ceil(math.log2(ranks)) + BETA_S * (ranks - 1) / ranks * values if ranks > 1 else 0.0


def batch_s(layers: Sequence[Layer], ranks: int) -> float:
    """All-reduce the gradients."""
    return sum(2 * _once(ranks, layer.weights) for layer in layers)


def grid_s(layers: Sequence[Layer], rows: int, columns: int, first: bool = False) -> float:
    """Weights over the rows, batch over the columns: gather Y, all-reduce the gradients of X and of a row's W.

    The first layer of a model needs no gradient of its input.
    """
    share = BATCH / columns
    total = 0.0
    for i, layer in enumerate(layers):
        total += _once(rows, share * layer.outputs) + 2 * _once(columns, layer.weights / rows)
        if i or not first:
            total += 2 * _once(rows, share * layer.inputs)
    return total


def model_s(layers: Sequence[Layer], ranks: int) -> float:
    return grid_s(layers, ranks, 1, first=True)


def domain_s(layers: Sequence[Layer], ranks: int) -> float:
    """Exchange halos forwards and backwards, and all-reduce the gradients."""
    halos = sum(ALPHA_S + BETA_S * BATCH * halo for layer in layers for halo in (layer.halo_in, layer.halo_out) if halo)
    return halos * (ranks > 1) + batch_s(layers, ranks)


def best_grid(ranks: int) -> tuple[float, int, int]:
    """Convolutions by batch, dense layers on the best grid: seconds, rows, columns."""
    sizes = [rows for rows in range(1, ranks + 1) if ranks % rows == 0]
    found = [(grid_s(DENSE, rows, ranks // rows), rows, ranks // rows) for rows in sizes]
    seconds, rows, columns = min(found)
    return seconds + batch_s(CONVOLUTIONS, ranks), rows, columns


def communication() -> Figure:
    """Each kind's time a step, against ranks."""
    counts = [2**k for k in range(1, 10)]
    kinds = {
        "batch": [batch_s(ALEXNET, p) for p in counts],
        "model": [model_s(ALEXNET, p) for p in counts],
        "domain (all layers)": [domain_s(ALEXNET, p) for p in counts],
        "integrated": [best_grid(p)[0] for p in counts],
    }
    series = [Series(name, list(counts), [1e3 * s for s in times], points=True) for name, times in kinds.items()]
    grids = ", ".join(f"{rows} × {columns} of {rows * columns}" for _, rows, columns in map(best_grid, (8, 64, 512)))
    says = (
        f"By formula, not measured: AlexNet, batch {BATCH:,}, 2 µs a message, 6 GB/s. "
        f"Integrated: convolutions by batch, dense layers on the best grid ({grids} ranks)."
    )
    axes = Axis("ranks", "log", values=True), Axis("communication of a step, ms", "log")
    return Figure("communication", "What communication costs by kind of parallelism", "lines", *axes, series, says)
