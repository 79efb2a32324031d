"""Seeds for independent streams of random numbers, derived from the one seed of a run."""

from __future__ import annotations

import hashlib
import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def stream(seed: int, purpose: str, *numbers: int) -> int:
    """A seed of 63 bits for one purpose (and rank, epoch ...), the same on every machine and in every version.

    A hash, so that no two purposes share a stream as they would under sums such as `seed * 1_000_003 + rank`.
    """
    text = json.dumps([seed, purpose, *numbers])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seed_torch(seed: int) -> None:
    """As `torch.manual_seed`, which takes a millisecond to remember the seed for a GPU that is not there."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def seed_everything(seed: int) -> None:
    """Seed the generators that user code draws from: of torch, NumPy and Python."""
    seed_torch(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


_turn = threading.RLock()  # a process has these generators once, whatever its threads


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, they draw from this seed; then they go on as if nothing had been."""
    with _turn, generators_as_they_were():
        seed_everything(seed)
        yield


@contextmanager
def generators_as_they_were() -> Iterator[None]:
    """Give the caller's generators their state back."""
    own, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(own)
            np.random.set_state(numpys)


def generators() -> dict[str, Any]:
    """Where these generators are, as state that can be saved."""
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, following = random.getstate()
    return {
        "global": torch.get_rng_state(),
        "numpy": [torch.from_numpy(np.asarray(keys, np.int64)), int(position), int(has_gauss), float(gauss)],
        "python": [version, torch.tensor(words, dtype=torch.int64), following],
    }


def restore_generators(saved: dict[str, Any]) -> None:
    torch.set_rng_state(saved["global"])
    keys, position, has_gauss, gauss = saved["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, words, following = saved["python"]
    random.setstate((version, tuple(words.tolist()), following))
