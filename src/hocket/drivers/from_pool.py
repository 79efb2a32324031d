"""Training without a common pace: each worker takes the next batch as soon as it has done with the last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hocket.core.message import Message
from hocket.drivers.course import Course
from hocket.drivers.feed import Pool
from hocket.drivers.session import FRAME


class FromPool:
    """Nobody waits for others, neither at the end of an epoch nor where a point of the learning curve is due.

    The point belongs to the moment at which its first batch is drawn: whoever draws it notes the time, and looks at the
    model that the run would return if it ended there. Where that model is the mean of all replicas, each worker sends
    worker 0 the replica that it had at that moment, which it still has at its next draw. While somebody evaluates,
    real clocks stand still. Where a worker is several ranks they draw together, and each sees to its part.
    """

    def __init__(self, course: Course, pool: Pool, saved: dict[str, Any] | None) -> None:
        self._course, self._pool, self._me = course, pool, course.session.worker.rank
        self._tickets = course.stride * course.plan.workers
        """From one point of the learning curve to the next."""
        strategy = course.session.strategy
        self._scattered = not strategy.server_ranks() and "shared-memory" not in strategy.needs
        """Whether what counts is the mean of all replicas."""
        self._at_the_draw = course.gradients.replica.values.clone() if self._scattered else torch.empty(0)
        """This worker's replica, as it was when its last batch was drawn."""
        self._stretch = self._heard = 0
        self._sums: dict[int, list[Any]] = {}
        """Worker 0, by stretch: the sum of the replicas that have come in, how many, and when it began."""
        if saved:
            pool.load_state(saved["pool"])
            self._stretch, self._heard, self._sums = saved["stretch"], saved["heard"], saved["sums"]
            self._at_the_draw = saved["at_the_draw"].to(self._at_the_draw.device)
            with course.clock.free():
                course.session.group.barrier()
                course.clock.line_up()

    def run(self) -> dict[str, Any]:
        course, session = self._course, self._course.session
        steps = course.shards.steps
        for ticket in self._drawn():
            step, share = divmod(ticket, course.plan.workers)
            course.epochs_are_over(step // steps)
            course.train_on(step // steps, step % steps, share)
        before = course.gradients.replica.values.clone()
        session.end()
        known: dict[str, Any] = {"consensus_distance": None}  # a worker has a copy of some age
        if self._scattered:
            with course.clock.free():
                last = torch.tensor([self._stretch])
                session.group.all_reduce(last, "max")
                self._pass(int(last), before)
                self._hear_all()
            known = course.own_replica(before)
        found = course.end(known)
        self._pool.close()  # outside the clock: MPI takes 10 ms for it
        return found

    def _drawn(self) -> Iterator[int]:
        """Tickets to train on."""
        course, pool = self._course, self._pool
        while True:
            ticket, meets, waits = pool.draw(course.rank.brake)
            if meets:
                if course.save(self._position):
                    return
                pool.rejoin()
                continue
            if waits:
                pool.wait(course.clock)
            if ticket >= pool.total:
                return
            self._reach(ticket)
            yield ticket
            pool.spend()
            course.rank.brake.passed(course.session.worker.step)
            course.mind_the_clock()

    def _reach(self, ticket: int) -> None:
        """See to the points of the learning curve that are due before this ticket."""
        course, values = self._course, self._course.gradients.replica.values
        stretch, is_first = ticket // self._tickets, ticket > 0 and ticket % self._tickets == 0
        self._pass(stretch, values if is_first else self._at_the_draw, course.now() if is_first else 0.0)
        if self._scattered:
            self._at_the_draw.copy_(values)
            if self._me == 0:
                self._hear()
                self._judge_whole()
        elif is_first:
            now = course.now()
            with course.clock.paused():
                x = course.session.strategy.consensus(course.session.worker)
                assert x is not None, "what counts lies in one place"
                course.clock.come_back(course.began_s + now, course.began_s + now, 1)  # a server may have been busy
            self._judge(stretch, now, x)

    def _judge(self, stretch: int, now: float, x: Tensor) -> None:
        self._pool.watch(+1)
        with self._course.clock.paused():
            self._course.gradients.portion.make_alike(x, counted=False)
        if self._course.judge_alone(stretch * self._course.stride, now, x):
            self._pool.empty()
        self._pool.watch(-1)

    def _pass(self, stretch: int, values: Tensor, now: float = 0.0) -> None:
        """This worker goes on to a stretch, which its replica had these values at the beginning of. Who drew its first
        batch knows when that was."""
        course = self._course
        while self._stretch < stretch:
            course.close(self._stretch)
            if course.verdict == "diverged":
                self._pool.empty()
            self._stretch += 1
            if not self._scattered:
                continue
            if self._me == 0:
                self._add(self._stretch, values, now)
            else:
                parts = values, torch.tensor([now], dtype=torch.float64)
                with course.clock.free():
                    course.session.group.isend(0, Message("replica", (self._stretch,), parts), FRAME)

    def _hear(self, timeout: float | None = 0.0) -> None:
        """Worker 0 takes in replicas that others have sent; without a time-out, the next one."""
        group = self._course.session.group
        with self._course.clock.free():
            try:
                while True:
                    _, msg = group.recv(tag=FRAME, timeout=timeout)
                    self._heard += 1
                    values, when = msg.tensors
                    self._add(msg.ints[0], values, float(when))
                    if timeout is None:
                        return
            except TimeoutError:
                return

    def _hear_all(self) -> None:
        """Worker 0 takes in all replicas that were sent; all workers call it together."""
        passed = torch.tensor([self._stretch if self._me else 0])
        self._course.session.group.all_reduce(passed)
        while self._me == 0 and self._heard < int(passed):
            self._hear(timeout=None)
        if self._me == 0:
            self._judge_whole()

    def _add(self, stretch: int, values: Tensor, now: float) -> None:
        """Count a replica in."""
        replica = self._course.gradients.replica
        found = self._sums.setdefault(stretch, [torch.zeros_like(replica.values), 0, 0.0])
        found[0] += values.to(found[0].device)
        found[1] += 1
        found[2] = max(found[2], now)

    def _judge_whole(self) -> None:
        """Worker 0 judges the mean of those stretches that all replicas have come in of, one after the other."""
        course = self._course
        workers, ensemble = course.plan.workers, course.session.ensemble
        whole = [stretch for stretch in sorted(self._sums) if self._sums[stretch][1] == workers]
        if ensemble is not None:  # what one rank has heard of its part, another may not yet
            fewest = torch.tensor([len(whole)])
            with course.clock.free():
                ensemble.all_reduce(fewest, "min")
            whole = whole[: int(fewest)]
        for stretch in whole:
            mean, count, when = self._sums.pop(stretch)
            self._judge(stretch, when, mean / count)

    def _position(self) -> dict[str, Any]:
        """Where all are when they meet, each with a ticket in its hand."""
        self._pool.met()
        if self._scattered:
            self._hear_all()
        self._course.session.group.barrier()
        return {
            "pool": self._pool.state(),
            "stretch": self._stretch,
            "heard": self._heard,
            "sums": self._sums,
            "at_the_draw": self._at_the_draw,
        }
