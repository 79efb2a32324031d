"""Samples that are decoded once a host: plain arrays in the user's cache, which every process maps."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hocket.tasks.files import cache

VERSION = 1
"""Of how arrays are put by; another one is decoded again."""
_CHECKS = "checksums.json"


def decoded(name: str, source: Sequence[str], decode: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
    """What `decode` gives, mapped from the cache where it was put by; `source` says all that it depends on.

    Processes share the memory of what they map: one that writes to it gets a copy of what it changes.
    """
    key = hashlib.sha256(json.dumps([VERSION, *source]).encode()).hexdigest()[:16]
    folder = place() / f"{name}-{key}"
    if (found := _mapped(folder)) is not None:
        return found
    tensors = list(decode())
    with suppress(OSError):  # a cache that cannot be written, or a full disk: each process has its own copy then
        _put_by(folder, tensors)
    return _mapped(folder) or tensors


def place() -> Path:
    """Where decoded samples are put by."""
    return cache() / "decoded"


def remove() -> int:
    """Remove all that was put by; returns how many bytes that were."""
    freed = sum(path.stat().st_size for path in place().rglob("*") if path.is_file())
    shutil.rmtree(place(), ignore_errors=True)
    return freed


def _mapped(folder: Path) -> list[Tensor] | None:
    """The arrays, if they are there, this user's, and unharmed."""
    try:
        if folder.stat().st_uid != os.geteuid():
            return None
        checks = json.loads((folder / _CHECKS).read_text())
        arrays = [np.load(folder / f"{i}.npy", mmap_mode="c", allow_pickle=False) for i in range(len(checks))]
    except (OSError, ValueError, TypeError):
        return None
    if [_checksum(array) for array in arrays] != checks:
        return None
    return [torch.from_numpy(array) for array in arrays]


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(array.reshape(-1).view(np.uint8).data)


def _put_by(folder: Path, tensors: Sequence[Tensor]) -> None:
    """Other processes see all of it or nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        arrays = [np.ascontiguousarray(tensor.numpy()) for tensor in tensors]
        for i, array in enumerate(arrays):
            np.save(new / f"{i}.npy", array, allow_pickle=False)
        (new / _CHECKS).write_text(json.dumps([_checksum(array) for array in arrays]))
        shutil.rmtree(folder, ignore_errors=True)  # what is there is harmed, or of another process just now
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
