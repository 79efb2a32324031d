"""What several runs of one thing say together."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from hocket.measure.result import Result


@dataclass
class Runs:
    """Runs that differ in their seeds alone."""

    results: list[Result] = field(default_factory=list)

    def add(self, result: Result) -> None:
        self.results.append(dataclasses.replace(result, state={}, best_state={}))  # many models would fill the memory

    @property
    def diverged(self) -> bool:
        return any(result.verdict == "diverged" for result in self.results)

    @property
    def times(self) -> list[float]:
        """Seconds to the target; infinite where a run never got there."""
        return [math.inf if r.time_to_target is None else r.time_to_target for r in self.results]

    @property
    def reached(self) -> int:
        """How many got to the target."""
        return sum(map(math.isfinite, self.times))

    @property
    def seconds(self) -> list[float]:
        return [r.seconds if r.virtual_seconds is None else r.virtual_seconds for r in self.results]

    @property
    def metrics(self) -> list[float]:
        return [r.test_metric for r in self.results if r.test_metric is not None]

    @property
    def judged(self) -> list[float]:
        """The metric on the samples that the runs went by."""
        return [r.judged_metric for r in self.results if r.judged_metric is not None]

    @property
    def speeds(self) -> list[float]:
        """Samples a second, of runs that learnt something: what leads nowhere has no speed."""
        return [r.samples_per_s for r in self.results if r.samples_per_s is not None and r.learnt]

    @property
    def in_vain(self) -> int:
        """How many learnt nothing."""
        return sum(not r.learnt for r in self.results)

    @property
    def samples(self) -> int:
        """Trained on, by all workers in all runs."""
        return sum(int(worker["samples"]) for r in self.results for worker in r.per_worker)

    def order(self, lower_is_better: bool) -> tuple[float, float, float]:
        """The less, the better: the median time to the target, then the median metric, then the median loss."""
        sign = 1 if lower_is_better else -1
        metrics = [math.inf if r.judged_metric is None else sign * r.judged_metric for r in self.results]
        losses = [math.inf if r.judged_loss is None else r.judged_loss for r in self.results]
        return statistics.median(self.times), statistics.median(metrics), statistics.median(losses)


def overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether the ranges of two samples have anything in common."""
    return min(a) <= max(b) and min(b) <= max(a)
