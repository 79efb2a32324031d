"""Interleaved comparison of two ways to do the same thing, each speed with the accuracy that its run reached."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"

if TYPE_CHECKING:
    import hocket


T = TypeVar("T")


class Measured(NamedTuple):
    """A speed or a time, and the test accuracy of the run that had it; NaN where nothing was trained."""

    value: float
    accuracy: float = float("nan")


TRIES = 3
MOST_OF_OTHERS = 0.1
"""The share of one core that others may use in a round that counts."""


def others_s() -> float:
    """Seconds of processor time that this machine has spent on other processes than this one and its children."""
    with open("/proc/stat") as lines:
        user, nice, system, _, _, irq, soft_irq = (int(word) for word in next(lines).split()[1:8])
    own = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    ticks = user + nice + system + irq + soft_irq
    return ticks / os.sysconf("SC_CLK_TCK") - sum(used.ru_utime + used.ru_stime for used in own)


def undisturbed(run: Callable[[], T], tries: int = TRIES) -> T:
    """What a round gives. One that others disturb is made again, and said to be disturbed where all tries were."""
    for _ in range(tries):
        began, others = time.monotonic(), others_s()
        found = run()
        share = (others_s() - others) / (time.monotonic() - began)
        if share <= MOST_OF_OTHERS:
            return found
    print(f"others used {share:.0%} of a core beside a round, tried {tries} times", flush=True)
    return found


def speed_of(result: hocket.Result, unit: float = 1.0) -> Measured:
    """Samples a second, or so many at a time. A run that diverged has no speed."""
    if result.samples_per_s is None:
        raise SystemExit(f"{result.strategy} with {result.workers} workers diverged: there is no speed to compare")
    return Measured(result.samples_per_s / unit, result.test_metric or 0.0)


def shown(runs: list[Measured], form: str = ",.3f") -> str:
    """The median with the smallest and the largest, and the median accuracy where there is one."""
    values, accuracy = [run.value for run in runs], statistics.median(run.accuracy for run in runs)
    spread = f"{statistics.median(values):{form}} (from {min(values):{form}} to {max(values):{form}})"
    return spread if accuracy != accuracy else f"{spread}, accuracy {accuracy:.4f}"


def say_where() -> None:
    """The commit and the machine."""
    here = Path(__file__).parent
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, check=False
    ).stdout.strip()
    from hocket.measure.result import versions

    found = versions()
    mpi = " ".join(f"{name} {found[name]}" for name in ("mpi4py", "mpich") if name in found)
    machine = f"{found['processor']}, {len(os.sched_getaffinity(0))} cores"
    print(f"# commit {commit or 'unknown'}; {machine}; torch {found['torch']}, {mpi}", flush=True)


def compare(
    name_a: str, a: Callable[[], Measured], name_b: str, b: Callable[[], Measured], unit: str, rounds: int = 7
) -> float:
    """Run A B A B ... after one warm-up of each; print medians with spread, and the ratio A / B."""
    a()
    b()
    found: dict[str, list[Measured]] = {name_a: [], name_b: []}
    ratios = []
    for _ in range(rounds):
        found[name_a].append(undisturbed(a))
        found[name_b].append(undisturbed(b))
        ratios.append(found[name_a][-1].value / found[name_b][-1].value)
    for name, runs in found.items():
        print(f"{name}: median {shown(runs)} {unit}", flush=True)
    ratio = statistics.median(ratios)
    print(f"ratio: {ratio:.3f} (from {min(ratios):.3f} to {max(ratios):.3f}, {rounds} rounds)", flush=True)
    return ratio
