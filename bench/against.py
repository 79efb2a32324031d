"""This checkout against another one, case by case: a change of the frame must cost no speed.

    python bench/against.py OTHER/src [CASE ...]

Every run is a process of its own, so that each imports its own Hocket; the two take turns. The ratio is this one's
samples a second over the other's; for `sim`, the other's real seconds over this one's. A round that other processes
disturb is made again.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from common import say_where, undisturbed

HERE = Path(__file__).parents[1] / "src"
ROUNDS = 7

CASES: dict[str, dict[str, Any]] = {
    "serial": dict(task="mnist-mlp", strategy="serial", workers=1, engine="threads", batch=64, steps=1500),
    "allreduce-64": dict(task="mnist-mlp", strategy="allreduce", workers=2, engine="mpi", batch=64, steps=6000),
    "allreduce-512": dict(task="mnist-mlp", strategy="allreduce", workers=2, engine="mpi", batch=512, steps=290),
    "torch": dict(task="mnist-mlp", strategy="allreduce", workers=2, engine="torch", batch=64, steps=400),
    "local-sgd": dict(task="mnist-mlp", strategy="local-sgd", workers=2, engine="mpi", batch=64, steps=6000),
    "server": dict(
        task="mnist-mlp", strategy="server:mode=async,stale=none", workers=2, engine="mpi", batch=512, steps=290
    ),
    "hogwild-16": dict(task="mnist-mlp", strategy="hogwild", workers=2, engine="threads", batch=16, epochs=2, lr=0.03),
    "sim": dict(task="blobs", strategy="allreduce", workers=64, engine="sim", batch=16, steps=60),
    "sim-server": dict(task="blobs", strategy="server:mode=async", workers=16, engine="sim", batch=16, steps=60),
}

HERE_ALONE: dict[str, dict[str, Any]] = {
    "server": dict(strategy="server:mode=async,stale=none,lookahead=0"),
}
"""Settings of this checkout that make it do what one before it did."""

RUN = """
import json, sys, hocket
case = json.loads(sys.argv[1])
result = hocket.fit(case.pop("task"), progress=False, trace=0, momentum=0.0, **case)
speed = 1 / result.seconds if result.virtual_seconds is not None else result.samples_per_s
print(json.dumps([speed, result.test_metric]))
"""


def measure(src: Path, case: dict[str, Any]) -> tuple[float, float]:
    """Speed and test accuracy of one run."""
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS")}
    env = os.environ | threads | {"PYTHONPATH": str(src)}
    done = subprocess.run([sys.executable, "-c", RUN, json.dumps(case)], env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    speed, accuracy = json.loads(done.stdout.splitlines()[-1])
    return speed, accuracy


def main() -> None:
    other, *names = sys.argv[1:] or sys.exit(__doc__)
    say_where()
    for name in names or CASES:
        found: dict[Path, list[tuple[float, float]]] = {HERE: [], Path(other): []}
        cases = {HERE: CASES[name] | HERE_ALONE.get(name, {}), Path(other): CASES[name]}
        for src in found:
            measure(src, cases[src])
        for _ in range(ROUNDS):
            for src, runs in found.items():
                runs.append(undisturbed(partial(measure, src, cases[src])))
        ratios = [a / b for (a, _), (b, _) in zip(*found.values(), strict=True)]
        medians = [statistics.median(speed for speed, _ in runs) for runs in found.values()]
        accuracies = [statistics.median(accuracy for _, accuracy in runs) for runs in found.values()]
        ours, theirs = (f"{m:,.1f} (accuracy {a:.3f})" for m, a in zip(medians, accuracies, strict=True))
        spread = f"{statistics.median(ratios):.3f} (from {min(ratios):.3f} to {max(ratios):.3f})"
        print(f"{name}: {ours} against {theirs}, ratio {spread}", flush=True)


if __name__ == "__main__":
    main()
