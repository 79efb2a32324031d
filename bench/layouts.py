"""Models and images that are split over 2 ranks, against one process: speed, a pipeline's bubble, a halo's time.

`python bench/layouts.py [ROUNDS] [CASE ...]`: the three ways are interleaved, medians are shown.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import Measured, say_where, shown
from torch import Tensor, nn

import hocket
from hocket.layouts.microbatches import bubble


def _samples(count: int, *shape: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(count, *shape, generator=g), torch.randint(0, 10, (count,), generator=g)


def _wide() -> nn.Module:
    return nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096))


def _deep() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(1536, 1536), nn.ReLU())))


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(8), nn.Flatten(),
        nn.Linear(32 * 32 * 32, 10),
    )  # fmt: skip


def _task(model: Callable[[], nn.Module], steps: int, batch: int, *shape: int) -> hocket.Task:
    data = _samples(steps * batch, *shape), _samples(8, *shape)
    return hocket.Task(model=model, data=data, batch=batch, lr=1e-4, epochs=1)


wide = _task(_wide, 4, 256, 4096)
deep = _task(_deep, 4, 2048, 1536)  # smaller micro-batches cost a process alone a quarter more than the batch
convolutions = _task(_convolutions, 20, 1, 3, 512, 512)
several = _task(_convolutions, 5, 4, 3, 512, 512)

CASES = {
    "wide": ("tensor=2", "4096-4096-4096 by outputs and inputs"),
    "deep": ("pipeline=2,microbatches=8,stages=6+6", "two equal stages, 1F1B, 8 micro-batches"),
    "convolutions": ("domain=2", "512x512 images by rows, one at a time"),
    "several": ("domain=2", "the same, four at a time"),
}


WAYS = ("serial", "two at once", "split")
"""Two processes that each train a model of their own, and say nothing, show what the second core can give at most."""


def _run(name: str, way: str, layout: str) -> hocket.Result:
    settings: dict[str, Any] = {
        "serial": {"strategy": "serial", "workers": 1},
        "two at once": {"strategy": "local-sgd:every=1000", "workers": 2},
        "split": {"layout": layout},
    }[way]
    task = f"{Path(__file__).resolve()}:{name}"
    return hocket.fit(task, engine="mpi", epochs=1, progress=False, **settings)


def main() -> None:
    say_where()
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    for name in sys.argv[2:] or CASES:
        layout, what = CASES[name]
        print(f"{name}: {what}", flush=True)
        found: list[dict[str, hocket.Result]] = [{way: _run(name, way, layout) for way in WAYS} for _ in range(rounds)]
        for way in WAYS:
            speeds, serial = [[of[w].samples_per_s or 0.0 for of in found] for w in (way, "serial")]
            ratios = [Measured(speed / base) for speed, base in zip(speeds, serial, strict=True)]
            median = statistics.median(speeds)
            print(f"  {layout if way == 'split' else way}: {median:,.1f} samples/s, {shown(ratios)} times serial")
        last = found[-1]["split"]
        times = last.per_worker[0]
        exposed = times["sending"] + times["transferring"] + times["waiting"]
        print(f"  of {last.seconds:.2f} s, {exposed:.2f} s were spent on the other rank; {last.bytes_sent:,} bytes")
        for number, stage in enumerate(last.pipeline):
            measured, held = stage["bubble"], stage["in_flight"]
            print(f"  stage {number + 1}: bubble {measured:.3f} (formula {bubble(2, 8):.3f}), {held} in flight")


if __name__ == "__main__":
    main()
