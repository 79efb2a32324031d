"""What a simulated worker's step costs when there are a thousand: `sim` and `fleet`, all in.

    python bench/fleet.py [--workers 1024] [--device cuda] [--rounds 5]

Microseconds of real time a worker-step, without what evaluation takes: local SGD on `blobs`, and on `mnist-mlp` at
batch 32 where its files are. `fleet` and `sim` train the same models, so their accuracies agree.
"""

from __future__ import annotations

import argparse

from common import Measured, say_where, shown  # before NumPy is loaded: it sets one BLAS thread

import hocket

CASES = [("blobs", "fleet", 16, 200, 2000), ("blobs", "sim", 16, 30, 30), ("mnist-mlp", "fleet", 32, 4, 100)]
"""Task, engine, batch, and steps of each worker on a CPU and on a GPU, so that a round takes seconds on both. 1,024
workers have two steps an epoch of `blobs`, both nearly full."""


def cost(task: str, engine: str, batch: int, steps: int, workers: int, device: str) -> Measured:
    """Microseconds a worker-step."""
    result = hocket.fit(
        task, strategy="local-sgd", engine=engine, workers=workers, batch=batch, steps=steps, device=device, trace=0,
        evaluate_every=1_000_000, progress=False,
    )  # fmt: skip
    return Measured(1e6 * result.seconds / (result.steps * workers), result.test_metric or 0.0)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--workers", type=int, default=1024)
    options.add_argument("--device", default="cpu")
    options.add_argument("--rounds", type=int, default=5)
    chosen = options.parse_args()
    say_where()
    found: dict[str, list[Measured]] = {}
    for number in range(chosen.rounds + 1):
        for task, engine, batch, on_cpu, on_gpu in CASES:
            steps = on_cpu if chosen.device == "cpu" else on_gpu
            name = f"{engine}, {chosen.workers} workers, {task}, batch {batch}, {chosen.device}"
            try:
                measured = cost(task, engine, batch, steps, chosen.workers, chosen.device)
            except hocket.UserError as error:
                if number == 0:
                    print(f"{name}: {error}", flush=True)
                continue
            if number:  # the first is a warm-up
                found.setdefault(name, []).append(measured)
    for name, runs in found.items():
        print(f"{name}: median {shown(runs, ',.2f')} us a worker-step", flush=True)


if __name__ == "__main__":
    main()
