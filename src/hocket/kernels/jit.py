"""How kernels are compiled: without the GIL, once, and again only when some kernel has changed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

_FOLDER = Path(__file__).parent


def _cache_folder() -> str:
    """Named after the text of all kernels, as Numba's own check sees only the file of the function that it caches.

    The code of the kernels that a function calls is part of what is cached, so a change in one file would else leave
    the old code in use in others. Empty, which is Numba's own choice, where the package cannot be written.
    """
    text = b"".join(path.read_bytes() for path in sorted(_FOLDER.rglob("*.py")))
    parent = numba.config.CACHE_DIR or (_FOLDER / "__pycache__" if os.access(_FOLDER, os.W_OK) else "")
    return str(Path(parent) / f"kernels-{hashlib.sha256(text).hexdigest()[:16]}") if parent else ""


_CACHE_FOLDER = _cache_folder()


def kernel(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorate a function as `numba.njit` does, with its options; other kernels may call it, and so may Python."""
    if function is None:
        return lambda function: kernel(function, **options)
    users_folder = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = _CACHE_FOLDER
    try:
        # Kernels make no arrays and keep none, so they need not count references: that took a tenth of a sparse loop
        return numba.njit(nogil=True, cache=True, _nrt=False, **options)(function)
    finally:
        numba.config.CACHE_DIR = users_folder
