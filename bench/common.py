"""Interleaved comparison of two ways to do the same thing."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"


def compare(
    name_a: str, a: Callable[[], float], name_b: str, b: Callable[[], float], unit: str, rounds: int = 7
) -> float:
    """Run A B A B ... after one warm-up of each; print medians with spread, and the ratio A / B."""
    a()
    b()
    found: dict[str, list[float]] = {name_a: [], name_b: []}
    ratios = []
    for _ in range(rounds):
        found[name_a].append(a())
        found[name_b].append(b())
        ratios.append(found[name_a][-1] / found[name_b][-1])
        print(f"  {found[name_a][-1]:,.3f}  {found[name_b][-1]:,.3f}  ratio {ratios[-1]:.3f}", flush=True)
    for name, values in found.items():
        print(f"{name}: median {statistics.median(values):,.3f} {unit} (from {min(values):,.3f} to {max(values):,.3f})")
    ratio = statistics.median(ratios)
    print(f"ratio: {ratio:.3f} (from {min(ratios):.3f} to {max(ratios):.3f}, {rounds} rounds)")
    return ratio
