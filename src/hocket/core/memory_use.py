"""How this process gets memory and gives it back, where the usual way takes more time than what is computed."""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of glibc's mallopt
_KEPT, _LARGE = 2**28, 2**25
_YOUNG = 50_000, 10, 10
"""Python's own are 700, 10, 10."""
_WORTH_A_MAP = 2**20
"""Bytes of zeros that are worth asking the system for by themselves."""


def untouched_zeros(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take no memory before they are written, if they are many, and in main memory.

    A gradient that nobody computes is as long as the model, and `torch.zeros` writes it.
    """
    nbytes = length * dtype.itemsize
    if device.type != "cpu" or nbytes < _WORTH_A_MAP:
        return torch.zeros(length, dtype=dtype, device=device)
    return torch.frombuffer(in_large_pages(nbytes), dtype=dtype)


def in_large_pages(nbytes: int) -> mmap.mmap:
    """Private memory that takes none before it is written, in large pages if the system has them."""
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def keep_freed_memory() -> None:
    """Have the C library keep up to 256 MB of what is freed, for tensors of the same sizes that come right after.

    It would give tensors of some hundred kilobytes back to the system, and get them again page by page: that takes as
    long as small models take to compute. Only glibc can be told.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        library.mallopt(_MMAP_THRESHOLD, _LARGE)
        library.mallopt(_TRIM_THRESHOLD, _KEPT)


def give_back_freed_memory() -> None:
    """Have the C library give the system what was freed: it keeps the memory of models that were only tried out."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """Inside, the garbage collector leaves alone what was there before, and looks through the rest less often.

    The objects of a thousand ranks live as long as the run, and it would go through them again and again.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*_YOUNG)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
