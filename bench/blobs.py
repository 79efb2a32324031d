"""The classic failure of asynchronous training, and its cure: accuracy on `blobs` by the number of simulated workers.

    python bench/blobs.py [--jobs N] [--epochs N] [--out docs/blobs.svg]

A naive server applies every gradient in full, however stale, at whatever the parameters have become meanwhile. The
default looks ahead, and tempers a gradient by how far the parameters are from where it was computed. All runs have the
same epochs as the serial one, 3 seeds each. Runs go side by side, one process each, and come to the same as alone.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from common import say_where  # before NumPy is loaded: it sets one BLAS thread

import hocket

WORKERS = (1, 2, 4, 8, 16, 32)
SEEDS = 3
CURVES = {
    "server:mode=async (the default)": ("server:mode=async", 0.0, "#0b6e4f"),
    "naive: stale=none, lookahead=0": ("server:mode=async,stale=none,lookahead=0", 0.0, "#c8553d"),
    "naive, momentum 0.9": ("server:mode=async,stale=none,lookahead=0", 0.9, "#7a7a7a"),
}


def accuracy(job: tuple[str, int, float, int, int]) -> float:
    strategy, workers, momentum, seed, epochs = job
    result = hocket.fit(
        "blobs", strategy=strategy, workers=workers, momentum=momentum, seed=seed, epochs=epochs, engine="sim", trace=0,
        progress=False,
    )  # fmt: skip
    return result.test_accuracy or 0.0


def svg(serial: float, curves: dict[str, list[float]]) -> str:
    """Accuracy over the number of workers (evenly spaced), with the serial one as a line."""
    width, height, left, top = 720, 360, 60, 20
    plot_w, plot_h = width - left - 20, height - top - 80

    def x(i: int) -> float:
        return left + plot_w * i / (len(WORKERS) - 1)

    def y(value: float) -> float:
        return top + plot_h * (1 - value)

    def text(at_x: float, at_y: float, what: str, anchor: str = "middle") -> str:
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}">{what}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<line x1="{left}" x2="{left + plot_w}" y1="{y(value)}" y2="{y(value)}" stroke="#ddd"/>')
        parts.append(text(left - 8, y(value) + 4, f"{value:g}", "end"))
    parts += [text(x(i), top + plot_h + 18, str(n)) for i, n in enumerate(WORKERS)]
    parts.append(text(left + plot_w / 2, top + plot_h + 36, "workers"))
    parts.append(
        f'<line x1="{left}" x2="{left + plot_w}" y1="{y(serial)}" y2="{y(serial)}" stroke="#222" '
        'stroke-dasharray="5 4"/>'
    )
    names = [("serial", "#222"), *((name, CURVES[name][2]) for name in curves)]
    for name, values in curves.items():
        colour = CURVES[name][2]
        points = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(values))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{x(i):.1f}" cy="{y(v):.1f}" r="3.5" fill="{colour}"/>' for i, v in enumerate(values)]
    for k, (name, colour) in enumerate(names):
        at_x, at_y = left + (k % 2) * plot_w / 2, height - 26 + (k // 2) * 18
        parts.append(f'<rect x="{at_x}" y="{at_y - 9}" width="14" height="10" fill="{colour}"/>')
        parts.append(text(at_x + 20, at_y, name, "start"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time")
    options.add_argument("--epochs", type=int, default=100)
    options.add_argument("--out", type=Path, default=Path("docs/blobs.svg"))
    chosen = options.parse_args()
    say_where()
    jobs = [("serial", 1, 0.0, seed, chosen.epochs) for seed in range(SEEDS)]
    jobs += [(s, n, m, seed, chosen.epochs) for s, m, _ in CURVES.values() for n in WORKERS for seed in range(SEEDS)]
    curves: dict[str, list[float]] = {}
    began = time.perf_counter()
    with ProcessPoolExecutor(chosen.jobs) as pool:
        found = pool.map(accuracy, jobs)
        serial = statistics.mean(next(found) for _ in range(SEEDS))
        print(f"serial, {chosen.epochs} epochs: {serial:.4f}", flush=True)
        for name in CURVES:
            curves[name] = []
            for workers in WORKERS:
                runs = [next(found) for _ in range(SEEDS)]
                curves[name].append(statistics.mean(runs))
                print(f"{name}, {workers}: {curves[name][-1]:.4f} ({min(runs):.4f} to {max(runs):.4f})", flush=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    minutes, cpu_minutes = (time.perf_counter() - began) / 60, (used.ru_utime + used.ru_stime) / 60
    print(f"{minutes:.1f} minutes, {cpu_minutes:.1f} of CPU, {chosen.jobs} runs at a time")
    worst = min(curves[next(iter(CURVES))])
    print(f"the default is at most {100 * (serial - worst):.2f} points below serial")
    chosen.out.write_text(svg(serial, curves))


if __name__ == "__main__":
    main()
