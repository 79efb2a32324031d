"""Local SGD: replicas step on their own and are averaged now and then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from hocket.core.comm import Comm
from hocket.core.errors import UserError
from hocket.core.state import State
from hocket.core.threaded import Threaded
from hocket.core.weight import Weight
from hocket.core.worker import Need, Steps, Worker, strategy

MOST_THREADS = 1024


@strategy("local-sgd")
@dataclass(frozen=True)
class LocalSGD(Threaded):
    """Average the replicas every `every` steps (Stich 2019, algorithm 1)."""

    every: int = 8
    post_local: int = 0
    """Average at every step until this one (post-local SGD, Lin 2018); 0 is local from the start."""
    momentum: Literal["keep", "average", "reset"] = "keep"
    """What becomes of the optimizer's state when replicas are averaged."""
    group: int = 0
    """Workers in a group that averages by itself (hierarchical local SGD); 0 is one group of all."""
    between: int = 4
    """With groups: every so many averages inside a group, all workers average. With `hot`: every so many averages of
    those rows, all rows are averaged."""
    hogwild: int = 0
    """Compiled threads in each worker that train its replica without locks, where the model has a compiled form."""
    hot: float = 0.0
    """With threads: the share of a model's rows, those that change most, that is averaged every time (Ji 2016)."""

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"collectives"})

    def check(self, workers: int) -> None:
        if self.every < 1 or self.between < 1:
            raise UserError(f"local-sgd: every and between must be 1 or more, got {self.every} and {self.between}")
        if self.post_local < 0:
            raise UserError(f"local-sgd: post_local must be 0 or more, got {self.post_local}")
        if self.group < 0 or (self.group and workers % self.group):
            raise UserError(f"local-sgd: {workers} workers cannot form groups of {self.group}; use a divisor")
        if not 0 <= self.hogwild <= MOST_THREADS or not 0 <= self.hot < 1:
            raise UserError(
                f"local-sgd: hogwild must be from 0 to {MOST_THREADS}, and hot from 0 to below 1; "
                f"got {self.hogwild} and {self.hot:g}"
            )
        if self.hogwild and (self.group or self.post_local or self.momentum != "keep"):
            raise UserError("local-sgd: hogwild threads go with every, hot and between alone; leave the rest out")

    def idle(self) -> Mapping[str, str]:
        idle = {} if self.group or (self.hot and self.hogwild) else {"between": "group"}
        return idle if self.hogwild else idle | {"hot": "hogwild"}

    def worker(self, w: Worker) -> Steps:
        group = w.comm.split(w.rank // self.group) if self.group else w.comm
        # The samples since the last average, in the group and of all; averages; the step at which all last met
        now = w.keep("now", State(in_group=Weight(), in_all=Weight(), rounds=0, met_all=0))
        while (g := (yield)) is not None:
            w.descend(g)
            now.in_group += Weight(g.samples, None)
            now.in_all += g.weight
            if w.step > self.post_local and w.step % self.every != 0:
                continue
            now.rounds += 1
            if self.group == 0 or w.step <= self.post_local or now.rounds % self.between == 0:
                self.average(w, w.comm, now.in_all)
                now.in_all, now.met_all = Weight(), w.step
            else:
                self.average(w, group, now.in_group)
            now.in_group = Weight()
        if now.met_all != w.step:
            self.average(w, w.comm, now.in_all)  # the farewell: everyone leaves with one model

    def took(self, w: Worker, weight: Weight, hot: Sequence[slice]) -> None:
        """What becomes of steps that compiled threads took: at most up to the next average."""
        now = w.kept("now")
        now.in_group += weight
        now.in_all += weight
        if w.step % self.every != 0:
            return
        now.rounds += 1
        if not hot or now.rounds % self.between == 0:
            self.average(w, w.comm, now.in_all)
            now.in_all, now.met_all = Weight(), w.step
        else:
            for rows in hot:
                w.average_replicas(now.in_group, span=rows)
        now.in_group = Weight()

    def part(self, w: Worker) -> tuple[Tensor, float]:
        return w.x, w.kept("now").in_all.samples or 1.0

    def average(self, w: Worker, comm: Comm, weight: Weight) -> None:
        w.average_replicas(weight, comm)
        match self.momentum:
            case "average":
                for state in w.optimizer_state():
                    comm.all_reduce(state, op="mean")
            case "reset":
                w.reset_optimizer()
