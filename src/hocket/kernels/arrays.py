"""Names for the arrays that kernels take, how one is made and how one is copied."""

from __future__ import annotations

from typing import Any

import numpy as np

from hocket.kernels.jit import kernel

APART = 128
"""Bytes that cores fetch and lose together: a cache line, and the one beside it that many fetch along."""

Floats = np.ndarray[Any, np.dtype[np.float32]]
Integers = np.ndarray[Any, np.dtype[np.int64]]
Columns = np.ndarray[Any, np.dtype[np.int32]]

Words = Integers
"""The control words of shared memory."""
Rows = Floats
"""Vectors of parameters, one a row."""
Vector = Floats
"""One of them."""


@kernel
def copy(source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> None:
    """`target` is as long as `source`, and elsewhere: NumPy's way looks for an overlap, and may make a third array."""
    for i in range(len(target)):
        target[i] = source[i]


def apart(shape: int | tuple[int, ...], kind: type[np.generic]) -> np.ndarray[Any, Any]:
    """Zeros on cache lines of their own, which no other thread writes on: it would slow down who works there."""
    nbytes = int(np.prod(shape)) * np.dtype(kind).itemsize
    memory = np.zeros(nbytes + 2 * APART, np.uint8)
    begin = -memory.ctypes.data % APART
    return memory[begin : begin + nbytes].view(kind).reshape(shape)
