"""PowerSGD: a matrix as the product of two thin ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hocket.compress.scheme import Biased, as_bytes, compressor, floats
from hocket.core.errors import UserError


@compressor("powersgd")
@dataclass(frozen=True)
class PowerSGD(Biased):
    """Each layer's matrix as a product of rank `rank`, by one power iteration a step (Vogels 2019).

    In a mean all ranks sum the factors and begin from the same Q; biases, and layers that the factors would not make
    smaller, travel as they are. A single vector is cut into rows, and its two factors are sent.
    """

    travels: ClassVar[Literal["factored"]] = "factored"
    first: ClassVar[str] = "rank"
    rank: int = 2

    @property
    def arrives(self) -> float:
        return 0.1

    def check(self) -> None:
        super().check()
        if self.rank < 1:
            raise UserError(f"compressor powersgd: rank must be 1 or more, got {self.rank}")

    def check_model(self, shapes: Sequence[torch.Size]) -> None:
        largest = max((min(as_matrix(shape)) for shape in shapes if len(shape) > 1), default=0)
        if not largest:
            raise UserError("compressor powersgd: the model has no matrices; use another, such as topk")
        if self.rank > largest:
            raise UserError(
                f"compressor powersgd: rank {self.rank} is more than the model's matrices have; use {largest} or less"
            )

    def helps(self, shape: Sequence[int]) -> bool:
        """Whether a layer's factors are smaller than it is."""
        if len(shape) < 2:
            return False
        rows, columns = as_matrix(shape)
        return self.rank * (rows + columns) < rows * columns

    def _form(self, n: int) -> tuple[int, int, int]:
        """Rows, columns and rank of a vector that is no layer."""
        columns = math.isqrt(n - 1) + 1 if n else 0
        rows = -(-n // columns) if columns else 0
        return rows, columns, min(self.rank, rows, columns)

    def size(self, n: int) -> int:
        rows, columns, rank = self._form(n)
        return 4 * rank * (rows + columns)

    def encode(self, x: Tensor, seed: int) -> Tensor:
        n = x.numel()
        rows, columns, rank = self._form(n)
        if n == 0:
            return torch.empty(0, dtype=torch.uint8)
        matrix = torch.zeros(rows * columns)
        matrix[:n] = x
        matrix = matrix.view(rows, columns)
        start = torch.randn(columns, rank, generator=torch.Generator().manual_seed(seed))
        left = orthogonal(matrix @ start)
        return as_bytes(torch.cat([left.reshape(-1), (matrix.T @ left).reshape(-1)]))

    def decode(self, block: Tensor, n: int) -> Tensor:
        rows, columns, rank = self._form(n)
        if n == 0:
            return torch.empty(0)
        factors = floats(block, 0, rank * (rows + columns))
        left, right = factors[: rows * rank].view(rows, rank), factors[rows * rank :].view(columns, rank)
        return (left @ right.T).reshape(-1)[:n].clone()


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """A layer as a matrix: what comes out, and all that goes in."""
    return shape[0], math.prod(shape[1:])


def orthogonal(matrix: Tensor) -> Tensor:
    """The columns made orthogonal to each other, of length 1 or 0, one after the other (Gram and Schmidt)."""
    matrix = matrix.clone()
    for i, column in enumerate(matrix.T):
        before = float(column.norm())
        for _ in range(2):  # once more, for what rounding left over
            if i:
                column -= matrix[:, :i] @ (matrix[:, :i].T @ column)
        length = float(column.norm())
        column.mul_(1 / length if length > 1e-6 * before else 0.0)
    return matrix
