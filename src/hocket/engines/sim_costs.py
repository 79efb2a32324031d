"""What things cost in virtual time: gradients, cores, collectives, a server's work."""

from __future__ import annotations

import heapq
import itertools
import math
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from hocket.core.errors import UserError, shown
from hocket.core.units import seconds
from hocket.engines.sim_times import PREFIX, played

SERVER_PASSES = 10
"""Times that a server goes over the bytes of a message: it tempers a gradient, steps, and keeps what was read."""


def compute_model(text: str, rng: random.Random, rank: int = 0, seed: int = 0) -> Callable[[int], float | None]:
    """The seconds of a rank's nth gradient on a full batch; None stands for what it really took."""
    if text == "measured":
        return lambda n: None
    if shape := lognormal(text):
        return lambda n: rng.lognormvariate(*shape)
    if found := played(text, rank, seed):
        return found
    constant = seconds(text, "compute")
    return lambda n: constant


def lognormal(text: str) -> tuple[float, float] | None:
    """Mean and standard deviation of the logarithm, where times are drawn."""
    if not text.startswith("lognormal:"):
        return None
    median, _, sigma = text.removeprefix("lognormal:").partition(":")
    mean_log = math.log(max(seconds(median, "compute"), 1e-12))
    spread = float(sigma or 0.2) if re.fullmatch(r"([0-9]*\.?[0-9]+)?", sigma) else math.inf
    if spread > 5:
        raise UserError(f"compute: cannot read {shown(sigma)} as a lognormal's sigma; it is a number from 0 to 5")
    return mean_log, spread


def compute_of_all(text: str, seed: int, size: int) -> Callable[[], Any]:
    """The seconds of every rank's next gradient, in one vector, or one number where all take as long."""
    generators = [random.Random(f"{seed}/{rank}") for rank in range(size)]
    if shape := lognormal(text):
        return Draws(generators, *shape)
    models = [compute_model(text, generators[rank], rank, seed) for rank in range(size)]
    if not text.startswith(PREFIX):
        return lambda: models[0](0)
    steps = itertools.count()

    def each() -> Any:
        n = next(steps)
        return np.array([model(n) for model in models])

    return each


class Draws:
    """What `random.lognormvariate` gives, of many generators at once: a vector a call, drawn ahead in blocks."""

    AHEAD = 128
    """Pairs of numbers that each generator draws at a time; about three in four give a value."""

    def __init__(self, generators: list[random.Random], mean_log: float, spread: float) -> None:
        self._mean_log, self._spread = mean_log, spread
        self._generators = []
        for generator in generators:
            words = generator.getstate()[1]
            same = np.random.RandomState()  # has the same algorithm, in arrays
            same.set_state(("MT19937", np.array(words[:-1], dtype=np.uint32), words[-1], 0, 0.0))
            self._generators.append(same)
        self._values = np.zeros((len(generators), 0))
        self._counts = np.zeros(len(generators), dtype=np.int64)
        self._at = 0

    def __call__(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        while self._at >= self._counts.min():
            self._draw()
        self._at += 1
        found: np.ndarray[Any, np.dtype[np.float64]] = np.exp(
            self._mean_log + self._spread * self._values[:, self._at - 1]
        )
        return found

    def _draw(self) -> None:
        """Kinderman and Monahan's ratio of uniforms, as in Python's random.normalvariate."""
        u = np.stack([generator.random_sample((self.AHEAD, 2)) for generator in self._generators])
        u_1, u_2 = u[..., 0], 1.0 - u[..., 1]
        z = 4 * math.exp(-0.5) / math.sqrt(2.0) * (u_1 - 0.5) / u_2
        left = np.arange(self._at, self._values.shape[1])[None] < self._counts[:, None]
        good = np.concatenate([left, z * z / 4.0 <= -np.log(u_2)], 1)
        values = np.concatenate([self._values[:, self._at :], z], 1)
        order = np.argsort(~good, axis=1, kind="stable")
        self._values, self._counts, self._at = np.take_along_axis(values, order, 1), good.sum(1), 0


def slow_groups(text: str, size: int) -> list[tuple[int, float]]:
    """(how many, factor) for each group of slow workers in `1x3+2x1.5`."""
    groups = []
    for part in filter(None, text.split("+")):
        match = re.fullmatch(r"(\d{1,9})x(\d{1,9}(?:\.\d+)?)", part, re.ASCII)
        if not match or float(match[2]) <= 0:
            raise UserError(
                f"stragglers: cannot read {shown(part)}; write how many workers are how much slower, like 2x3: "
                "two workers, each 3 times slower"
            )
        groups.append((int(match[1]), float(match[2])))
    if sum(n for n, _ in groups) > size:
        raise UserError(
            f"stragglers={text} makes {sum(n for n, _ in groups)} workers slow, but there are {size}; "
            "2x3 is two workers, each 3 times slower"
        )
    return groups


def slowdowns(text: str, workers: int, size: int) -> list[float]:
    """By what factor each of the ranks is slower; those behind the workers are not."""
    slow = [1.0] * size
    after = 1  # rank 0 comes last: it is the one that people look at
    for count, factor in slow_groups(text, size):
        for rank in range(after, after + count):
            slow[rank % workers] = factor
        after += count
    return slow


def collective_s(kind: str, nbytes: int, size: int, latency_s: float, byte_s: float) -> float:
    """One priced event a collective, by the algorithms that MPI libraries choose for large vectors."""
    if size == 1:
        return 0.0
    hops = math.ceil(math.log2(size))
    share = (size - 1) / size
    match kind:
        case "all_reduce":  # recursive halving, then doubling (Rabenseifner)
            return 2 * hops * latency_s + 2 * share * nbytes * byte_s
        case "reduce_scatter" | "all_gather":
            return hops * latency_s + share * nbytes * byte_s
        case "broadcast":  # scatter, then all-gather
            return 2 * hops * latency_s + 2 * share * nbytes * byte_s
        case "barrier":
            return hops * latency_s
    return 0.0


class Cores:
    """The cores that all ranks share: what is computed waits for the first that is free, and then has it alone."""

    def __init__(self, count: int) -> None:
        self._free_s = [0.0] * count

    def take(self, now_s: float, cost_s: float) -> float:
        """When something that takes so long and is asked for now is done. To be asked in the order of time."""
        done_s = max(now_s, self._free_s[0]) + cost_s
        heapq.heapreplace(self._free_s, done_s)
        return done_s
