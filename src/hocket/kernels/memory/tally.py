"""Numbers that ranks of one host count up together, without asking anybody."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hocket.kernels.jit import kernel, one_compiles
from hocket.kernels.memory.atomics import fetch_add
from hocket.kernels.memory.block import Block

Words = NDArray[np.int64]


def nbytes(numbers: int) -> int:
    """Of the block that they need. They begin at 0, as all new memory does."""
    return 8 * numbers


def load_kernels() -> None:
    """Compile what it calls, or load it from the cache."""
    with one_compiles():
        Tally(Block.anonymous(nbytes(1))).take()


class Tally:
    """A `Counter` in a block that all ranks map."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._words: Words = np.frombuffer(block.memory, np.int64)

    def take(self, count: int = 1, number: int = 0) -> int:
        return int(_take(self._words, number, count))

    def close(self) -> None:
        """The memory goes with whoever holds it last."""


@kernel
def _take(words: Words, number: int, count: int) -> int:
    return fetch_add(words, number, count)
