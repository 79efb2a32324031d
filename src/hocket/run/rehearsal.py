"""Whether a learning rate is too high for so many workers in shared memory: tried out before they start."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from hocket import optim
from hocket.core.replica import Replica
from hocket.core.seeds import seeded
from hocket.core.shard import Shards
from hocket.core.staleness import Handling, Staleness
from hocket.drivers.gradients import WholeModel
from hocket.drivers.plan import Plan
from hocket.tasks import SampleSet, Task

UPDATES = 320
ENOUGH = 0.5
"""Of the progress that as many serial steps make."""
HALVINGS = 6
"""Of the rate, in search of one that would do."""
PATIENCE_S = 6.0
"""What takes longer goes without a warning."""
JUDGED = 1024
"""Training samples that progress is measured on."""


class TooSlow(Exception):
    """The rehearsal took too long."""


def too_high(plan: Plan, task: Task, train: SampleSet) -> str:
    """One line, with what would do, if workers at this rate would come less than half as far as a serial run."""
    sharing = plan.made_strategy.sharing(1, plan.workers)
    if (
        not task.rehearsed
        or sharing is None
        or plan.workers == 1
        or plan.device != "cpu"
        or not optim.takes_momentum(plan.optimizer)
    ):
        return ""
    if plan.clip:  # which is what keeps steps short
        return ""
    rehearsal = Rehearsal(plan, task, train, time.monotonic() + PATIENCE_S)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a worker has; more get in each other's way on small batches
    try:
        with seeded(plan.seed):
            share = rehearsal.share(plan.lr, sharing.handling)
            if share >= ENOUGH:
                return ""
            advice = rehearsal.advice(sharing.handling)
    except TooSlow:
        return ""
    finally:
        torch.set_num_threads(threads)
    return (
        f"lr {plan.lr:g} looks too high for {plan.workers} workers on one vector: in a rehearsal of {UPDATES} updates "
        f"they came {max(share, 0):.0%} as far as a serial run; {advice}"
    )


@dataclass(frozen=True)
class Rehearsal:
    """Updates as workers make them at the worst: all read, then all write, one after the other."""

    plan: Plan
    task: Task
    train: SampleSet
    until_s: float

    def advice(self, handling: Handling) -> str:
        """What would do in place of the plan's rate and this handling of stale gradients."""
        if handling == "none" and self.share(self.plan.lr, "gap-mean") >= ENOUGH:
            return f"{self.plan.made_strategy.name}:stale=gap-mean would do"
        for halvings in range(1, HALVINGS + 1):
            lr = self.plan.lr / 2**halvings
            if self.share(lr, handling) >= ENOUGH:
                return f"--lr {lr:.2g} would do"
        return "use fewer workers"

    def share(self, lr: float, handling: Handling) -> float:
        """How far the workers come together, where as many serial updates come as far as 1."""
        before, serial = self._losses(lr, 1, "none")
        _, together = self._losses(lr, self.plan.workers, handling)
        if not serial < before:  # too high for anybody, or nothing to learn
            return 1.0
        return (before - together) / (before - serial) if math.isfinite(together) else 0.0

    def _losses(self, lr: float, workers: int, handling: Handling) -> tuple[float, float]:
        """The loss before and after."""
        replica = Replica(self.task.build_model(self.plan.seed))
        x, source = replica.x, WholeModel(self.task, replica, self.train)
        judged = torch.arange(min(JUDGED, len(self.train)))
        velocities = torch.zeros(workers, x.numel())
        rules = [Staleness(handling, workers, x) for _ in range(workers)]
        batches = Shards(len(self.train), 1, self.plan.batch, self.plan.seed).epoch(0, 0)
        before = float(source.evaluate(self.train, judged)[0])
        for first in range(0, UPDATES, workers):
            read = x.detach().clone()
            for worker, velocity in enumerate(velocities):
                if time.monotonic() > self.until_s:
                    raise TooSlow
                source.compute(batches[(first + worker) % len(batches)])
                velocity.mul_(self.plan.momentum).add_(replica.g)
            with torch.no_grad():
                for tau, (rule, velocity) in enumerate(zip(rules, velocities, strict=True)):
                    x.sub_(rule.temper(velocity, lr, tau, x, read), alpha=lr)
        return before / len(judged), float(source.evaluate(self.train, judged)[0]) / len(judged)
