"""Names for the arrays that kernels take, and how one is copied."""

from __future__ import annotations

from typing import Any

import numpy as np

from hocket.kernels.jit import kernel

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
