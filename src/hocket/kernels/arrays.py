"""Names for the arrays that kernels take."""

from __future__ import annotations

from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float32]]
Integers = np.ndarray[Any, np.dtype[np.int64]]
Columns = np.ndarray[Any, np.dtype[np.int32]]

Words = Integers
"""The control words of shared memory."""
Rows = Floats
"""Vectors of parameters, one a row."""
Vector = Floats
"""One of them."""
