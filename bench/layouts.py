"""Models and images that are split over 2 ranks, against one process: speed, a pipeline's bubble, a halo's time."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from common import Measured, compare, say_where
from torch import Tensor, nn

import hocket


def _samples(count: int, *shape: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(count, *shape, generator=g), torch.randint(0, 10, (count,), generator=g)


def _wide() -> nn.Module:
    return nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096))


def _deep() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(1536, 1536), nn.ReLU())))


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(8), nn.Flatten(),
        nn.Linear(16 * 32 * 32, 10),
    )  # fmt: skip


def _task(model: object, batch: int, *shape: int) -> hocket.Task:
    data = _samples(2 * batch, *shape), _samples(8, *shape)
    return hocket.Task(model=model, data=data, batch=batch, lr=1e-4, epochs=1)  # type: ignore[arg-type]


wide = _task(_wide, 256, 4096)
deep = _task(_deep, 512, 1536)
convolutions = _task(_convolutions, 4, 3, 512, 512)

CASES = {
    "wide": ("tensor=2", "4096-4096-4096 by outputs and inputs"),
    "deep": ("pipeline=2,microbatches=8,stages=6+6", "two equal stages, 1F1B, 8 micro-batches"),
    "convolutions": ("domain=2", "512x512 images by rows"),
}


def main() -> None:
    say_where()
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    for name, (layout, what) in CASES.items():
        print(f"{name}: {what}", flush=True)
        task = f"{Path(__file__).resolve()}:{name}"
        found: list[hocket.Result] = []

        def run(layout: str, task: str = task, found: list[hocket.Result] = found) -> Measured:
            strategy = "allreduce" if layout else "serial"
            result = hocket.fit(task, layout=layout, strategy=strategy, engine="mpi", steps=2, progress=False)
            found.append(result)
            return Measured(result.samples_per_s or 0.0)

        compare(layout, lambda layout=layout: run(layout), "serial", lambda: run(""), "samples/s", rounds)  # type: ignore[misc]
        last = next(result for result in reversed(found) if result.layout)
        times = last.per_worker[0]
        exposed = times["sending"] + times["transferring"] + times["waiting"]
        print(f"  of {last.seconds:.2f} s, {exposed:.2f} s were spent on the other rank; {last.bytes_sent:,} bytes")
        for number, stage in enumerate(last.pipeline):
            measured, held = stage["bubble"], stage["in_flight"]
            print(f"  stage {number + 1}: bubble {measured:.3f} (formula {1 / 9:.3f}), {held} in flight")


if __name__ == "__main__":
    main()
