"""Streams of random numbers that have nothing to do with each other."""

from __future__ import annotations

import torch

from hocket.core.seeds import stream


def test_streams_are_the_same_for_ever() -> None:
    """Runs of earlier versions can be repeated only as long as these values stay."""
    assert stream(0, "rng") == 3485302996166661215
    assert stream(7, "dropout", 3, 1) == 9033431451825548678


def test_no_two_streams_coincide() -> None:
    seeds = [
        stream(seed, purpose, *numbers)
        for seed in (0, 1, 1_000_003)
        for purpose in ("rng", "dropout", "order")
        for numbers in ((), (0,), (1,), (1_000_003,), (0, 1), (1, 0), (11,), (1, 1))
    ]
    assert len(set(seeds)) == len(seeds) == 72


def test_torch_takes_them() -> None:
    seeds = [stream(seed, "x") for seed in range(1000)]
    assert all(0 <= seed < 2**63 for seed in seeds) and max(seeds) > 2**62
    torch.Generator().manual_seed(max(seeds))
