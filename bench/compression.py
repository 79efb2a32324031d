"""What compression costs in accuracy and saves in bytes: one task, 4 workers, several compressors and seeds.

    python bench/compression.py mnist-mlp --epochs 3 --seeds 3 [compressor ...]

Runs on the simulator, whose arithmetic is that of a real run and whose bytes are counted as sent; it says nothing of
time. Every row has the same epochs, rate and seeds.
"""

from __future__ import annotations

import argparse
import statistics

from common import say_where  # first: it sets the number of threads

import hocket

SCHEMES = (
    "fp16", "bf16", "int8", "qsgd:bits=8", "qsgd:bits=4", "qsgd:bits=2", "terngrad", "natural", "onebit", "sign",
    "topk:0.01", "topk:0.01+qsgd:bits=8", "randomk:0.01,feedback=on", "threshold", "dgc", "powersgd:rank=2",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("task")
    parser.add_argument("schemes", nargs="*", default=SCHEMES)
    parser.add_argument("--strategy", default="allreduce")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float)
    asked = parser.parse_intermixed_args()
    say_where()
    print(f"# {asked.task}, {asked.strategy}, 4 workers, {asked.epochs} epochs, {asked.seeds} seeds, engine sim")
    print("| compressor | accuracy | difference in points | bytes sent | reduced |\n| --- | --- | --- | --- | --- |")
    plain: tuple[float, float] | None = None
    for scheme in ("none", *asked.schemes):
        runs = [
            hocket.fit(
                asked.task, strategy=asked.strategy, compress=scheme, workers=4, engine="sim", epochs=asked.epochs,
                seed=seed, lr=asked.lr, progress=False,
            )
            for seed in range(asked.seeds)
        ]  # fmt: skip
        accuracies = [run.test_metric or 0.0 for run in runs]
        accuracy, sent = statistics.mean(accuracies), statistics.mean(run.bytes_sent for run in runs)
        plain = plain or (accuracy, sent)
        spread = f"{accuracy:.4f} ({min(accuracies):.4f} to {max(accuracies):.4f})"
        points = f"{100 * (accuracy - plain[0]):+.2f}"
        print(f"| `{scheme}` | {spread} | {points} | {sent:,.0f} | {plain[1] / sent:.1f}x |", flush=True)


if __name__ == "__main__":
    main()
