"""What every training of Hocket's own has in common: its clock, learning curve, checkpoints and end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hocket import optim
from hocket.core.clock import FORWARD, RealClock
from hocket.core.errors import CommError
from hocket.core.replica import Part
from hocket.core.seeds import seed_everything, stream
from hocket.core.shard import Shards
from hocket.core.weight import Weight
from hocket.drivers.checkpoint import Checkpoint, pack, read
from hocket.drivers.fitting import check, for_workers
from hocket.drivers.gradients import Gradients
from hocket.drivers.judge import Judge, finite, mean_replica
from hocket.drivers.ledger import Ledger
from hocket.drivers.plan import Cadence, Plan
from hocket.drivers.report import report, tell_tensors
from hocket.drivers.schedule import Schedule
from hocket.drivers.session import Session
from hocket.measure.losses import Loss
from hocket.tasks import Progress, SampleSet, Task

Verdict = Literal["finished", "reached-target", "diverged", "interrupted"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""From the best to the worst."""
SHOWN_S = 1.0
"""Compiling that takes longer than this is told to the user."""


class Course:
    """One worker's training, as far as it does not depend on how batches are taken."""

    def __init__(
        self,
        session: Session,
        plan: Plan,
        task: Task,
        gradients: Gradients,
        train: SampleSet,
        test: SampleSet,
        validation: SampleSet | None,
    ) -> None:
        self.session, self.plan, self.gradients, self._task = session, plan, gradients, task
        self.rank, self.clock, self.status = session.rank, session.rank.clock, session.rank.status
        self.shards = Shards(len(train), plan.workers, plan.batch, plan.seed)
        self.stride = max(round(plan.evaluate_every * self.shards.steps), 1)
        """Steps between two points of the learning curve."""
        self.judge = Judge(
            self.rank, session.group, gradients, task, train, test, validation, of_each=plan.own_metrics,
            on_train=plan.train_metrics,
        )  # fmt: skip
        self._piece = plan.piece
        self._clips = plan.clip if not plan.made_strategy.lockstep else 0.0
        """Where workers do not go in step, each clips its own gradient."""
        charged_at_once = gradients.work > 0 and not isinstance(self.clock, RealClock)
        self._draws_the_two_ways = session.trace.fine and charged_at_once
        """Forward and backward in virtual time, which passes when both are done."""
        if not charged_at_once:
            gradients.spans = session.trace.spans(self.clock)
        self._epochs_over = 0
        self._tested: dict[str, float | None] = {}
        self.ledger = Ledger()
        self.verdict: Verdict = "finished"
        self.steps_done: Callable[[], int] = self._steps_done
        """Steps of this run so far, if all workers had taken equally many; all call it together."""
        self._by_the_clock = self.rank.comm.rank == 0 and math.isfinite(plan.checkpoint.seconds)
        self._regrouped = False
        """Whether the run goes on with other workers, who do not know how many samples those before them had."""

    def begin(self, schedule: Schedule) -> dict[str, Any] | None:
        """Start the clock: all workers are here, and the model has been looked at once.

        Returns where the run was when it was saved, if it goes on from there.
        """
        session, clock = self.session, self.clock
        self.schedule = schedule
        if session.compile_s > SHOWN_S and self.rank.comm.rank == 0:
            line = f"compiled in {session.compile_s:.1f} s (outside the clock; kept for the next run)"
            self.rank.tell("note", {"line": line}, b"")
        with clock.paused():
            self.ledger.initial_loss = self.judge.initial_loss()
            ready = torch.tensor([session.comm.common(clock.now())], dtype=torch.float64)
            session.everyone.all_reduce(ready, "max")
            self.gradients.evaluated()
        # After all are ready, since ranks that are threads share the generators
        seed_everything(stream(self.plan.seed, "model", self.rank.comm.rank))
        now = clock.now()  # from where all were ready, whenever this rank came to run again
        self.began_s = session.trace.origin_s = now - max(session.comm.common(now) - float(ready), 0.0)
        self._real = RealClock()
        self._saved_at_s = self._real.now()
        session.start()
        if self.rank.comm.rank == 0:
            self.rank.tell("begun", {}, b"")
        return self._go_on() if self.plan.resume else None

    def _go_on(self) -> dict[str, Any]:
        """Load the checkpoint that the run goes on from."""
        session = self.session
        saved = session.load(self._read() if self.rank.comm.rank == 0 else None)
        driver: dict[str, Any] = saved["driver"]
        self._regrouped = driver.get("regrouped", False)
        with self.clock.paused():
            session.everyone.barrier()
            session.load_random(saved)
            self._load(driver)
            session.trace.origin_s = self.began_s
            self._saved_at_s = self._real.now()
            session.everyone.barrier()
            self.clock.line_up()
        return driver

    def _read(self) -> Checkpoint:
        path, here = Path(self.plan.resume), self._about(0)
        found = read(path)
        check(path, found.about, here)
        fitting = for_workers(path, found, here)
        if found.about["workers"] != here["workers"]:
            note = f"{path.name} was saved by {found.about['workers']} workers; {here['workers']} go on, all alike"
            self.rank.tell("note", {"line": note}, b"")
        return fitting

    def train_on(self, epoch: int, step: int, share: int) -> None:
        """One gradient on this share of a step of an epoch, and what the strategy makes of it."""
        clock, worker = self.clock, self.session.worker
        self.status.stop()
        began = clock.now()
        index = self.shards.batch(epoch, step, share)
        samples = index.numel()  # len() of a tensor takes a microsecond
        self.status.lr = self.schedule.set(epoch * self.shards.steps + step + 1)
        worker.coming.weight = Weight(samples, self.shards.step_samples(step))
        if worker.on_part is None:
            # Before it is computed: by then, who is earlier in virtual time can have asked for one too.
            clock.charge(self.gradients.work * samples / self._piece)
        loss = self._compute(index, samples / self._piece)
        if self._clips:
            optim.clip(self.gradients.replica.g, self._clips, self.gradients.portion.length)
        if self._draws_the_two_ways:
            ended = clock.now()
            back = began + FORWARD * (ended - began)
            self.session.trace.add("forward", began, back)
            self.session.trace.add("backward", back, ended)
        if loss is not None:
            self.ledger.add(loss, samples, began - self.began_s, worker.step + 1)
        self.session.trace.add("gradient", began, clock.now(), step=worker.step + 1, samples=samples)
        self.session.step(worker.coming)
        if self._task.on_step is not None and loss is not None:
            self._task.on_step(self._progress(epoch + (step + 1) / self.shards.steps, float(loss)))

    def _compute(self, index: Tensor, share: float) -> Loss | None:
        """The gradient; a strategy that sends parts of it hears of them as they are complete."""
        listener, replica = self.session.worker.on_part, self.gradients.replica
        if listener is None:
            return self.gradients.compute(index, None)

        def ready(part: Part) -> None:
            self.clock.charge(share, part.done)
            listener(part)

        if self.rank.turns is None:
            return self.gradients.compute(index, ready)
        # Virtual time does not ask when it was computed, and nobody's turn may end in the middle of backward
        loss = self.gradients.compute(index, None)
        for part in replica.parts:
            ready(part)
        return loss

    def upcoming(self) -> Iterator[Tensor]:
        """What `train_on` will ask for, from the next step on, where workers go in step."""
        steps, worker = self.shards.steps, self.session.worker
        for step in range(worker.step, self.plan.steps):
            index = self.shards.batch(step // steps, step % steps, worker.rank)
            if len(index):
                yield from torch.split(index, self._piece)

    def epochs_are_over(self, epochs: int) -> None:
        """So many are; the task hears of each once, outside the clock."""
        on_epoch, done = self._task.on_epoch, self._epochs_over
        self._epochs_over = max(epochs, done)
        if on_epoch is None or epochs <= done:
            return
        with self._aside() if self.session.strategy.lockstep else self.clock.paused():
            for epoch in range(done + 1, epochs + 1):
                on_epoch(self._progress(epoch, self.status.loss))

    def _progress(self, epoch: float, loss: float) -> Progress:
        worker = self.session.worker
        judged = self.judge.curve[-1] if self.judge.curve else {}
        return Progress(
            worker.rank,
            worker.size,
            worker.step,
            epoch,
            self.now(),
            worker.lr,
            loss,
            self.gradients.replica.model,
            judged,
        )

    # Judging

    def now(self) -> float:
        """Seconds of training so far, by this worker's clock."""
        return self.clock.now() - self.began_s

    def pulse(self, *, final: bool, alike: bool = False) -> bool:
        """All workers meet, and the model is evaluated outside the clock. True ends the run.

        `alike`: their replicas are one already, as they are in the end.
        """
        if final:
            with self.clock.free():
                self.session.comm.barrier()  # inside the clock: the run lasts as long as its slowest worker
        with self._aside() as now:
            part, weight = self.session.strategy.part(self.session.worker)
            # All in one: a thousand simulated workers take turns for each collective
            sums = torch.tensor([*self.ledger.put_by(), weight], dtype=torch.float64)
            self.session.group.all_reduce(sums)
            loss, samples, bad, weights = sums.tolist()
            self.status.loss = train_loss = self.ledger.mean(loss, samples)
            replica, group, step = self.gradients.replica, self.session.group, self.steps_done()
            mean_weight, as_it_is = weights / group.size, final or alike
            values = replica.values if as_it_is else mean_replica(replica, group, part, weight, mean_weight)
            score = self.judge.together(values, step, step / self.shards.steps)
            if final:
                self._tested = self.judge.in_the_end(values)
            if self.rank.comm.rank == 0:
                self.judge.record(self.shards, step, now, train_loss, score)
            if bad:
                self.verdict = "diverged"
            elif self.verdict == "finished" and self.plan.goal.reached(score.metric):
                self.verdict = "reached-target"
            if final:
                self.verdict = self._agreed(self.verdict)
            self.tell_events()
            self.session.everyone.barrier()
            self.gradients.evaluated()
        return self.verdict != "finished"

    def _agreed(self, verdict: Verdict) -> Verdict:
        """What one worker has seen holds for all; the worst counts."""
        worst = torch.tensor([VERDICTS.index(verdict)])
        self.session.everyone.all_reduce(worst, "max")
        return VERDICTS[int(worst)]

    @contextmanager
    def _aside(self) -> Iterator[float]:
        """All workers leave the clock together, and nobody's training takes longer for it. Gives the latest of their
        times: that is when the state existed which they bring."""
        now = self.now()
        with self.clock.paused(), self._real.paused():
            times = torch.tensor([now, -now], dtype=torch.float64)
            self.session.everyone.all_reduce(times, "max")
            latest, earliest = float(times[0]), -float(times[1])
            yield latest
            if self.session.strategy.lockstep:
                self.clock.come_back(self.began_s + now, self.began_s + earliest, self.session.everyone.size)

    def judge_alone(self, step: int, now: float, values: Tensor) -> bool:
        """One worker looks at the model, outside its clock; True if it has reached the goal."""
        with self.clock.paused(), self._real.paused():
            score = self.judge.alone(values, step, step / self.shards.steps)
            self.judge.record(self.shards, step, now, self.status.loss, score)
            if self.plan.goal.reached(score.metric) and self.verdict == "finished":
                self.verdict = "reached-target"
                return True
        return False

    def close(self, stretch: int) -> None:
        """Where workers do not meet: put this one's losses since the last look by, and tell its events."""
        with self.clock.paused(), self._real.paused():
            self.status.loss = self.ledger.close(stretch)
            if self.ledger.diverged_at is not None:
                self.verdict = "diverged"
            self.tell_events()

    def _steps_done(self) -> int:
        if self.session.strategy.lockstep:
            return self.session.worker.step
        taken = torch.tensor([self.session.worker.step], dtype=torch.int64)
        self.session.group.all_reduce(taken)
        return -(-int(taken) // self.plan.workers)

    def tell_events(self) -> None:
        if events := self.session.trace.take():
            self.rank.tell("events", {"events": events}, b"")

    # Saving

    def saves_after(self, epochs: int) -> bool:
        """Whether a checkpoint is due after so many epochs."""
        cadence = self.plan.checkpoint.epochs
        return math.isfinite(cadence) and epochs % cadence == 0

    def saves_at_the_end(self) -> bool:
        """Whether a checkpoint is due when all is done, so that the run can be made longer later."""
        return self.plan.checkpoint != Cadence()

    def time_to_save(self) -> bool:
        """Whether checkpoints come by the clock, and it is time for one; known to worker 0."""
        return self._by_the_clock and self._real.now() > self._saved_at_s + self.plan.checkpoint.seconds

    def mind_the_clock(self) -> None:
        """Where checkpoints come by the clock, worker 0 calls for one when it is time."""
        if self.time_to_save():
            self._saved_at_s = self._real.now()
            self.rank.tell("brake", {"purpose": "save"}, b"")

    def save(self, position: Callable[[], dict[str, Any]]) -> bool:
        """All workers save the run together, with the position in the data. True if it shall end here."""
        with self._real.paused(), self.session.pause():
            stop = torch.tensor([int(self.rank.brake.purpose == "stop")])
            self.session.everyone.all_reduce(stop, "max")
            self.rank.brake.release()
            about = self._about(self.steps_done())
            states = self.session.gather(self._state() | position())
            if states:
                self.rank.tell("checkpoint", about, pack(about, states))
        self._saved_at_s = self._real.now()
        if stop:
            self.verdict = "interrupted"
        return bool(stop)

    def _about(self, step: int) -> dict[str, Any]:
        plan = self.plan
        names = ("task", "strategy", "workers", "batch", "seed", "optimizer", "momentum")
        portion = self.gradients.portion
        known: dict[str, Any] = {"step": step, "steps_per_epoch": self.shards.steps, "parameters": portion.parameters}
        servers, model = plan.made_strategy.server_ranks(), portion.fingerprint()
        known |= {"servers": servers, "model": model, "stages": portion.stages}
        return {name: getattr(plan, name) for name in names} | known

    def _state(self) -> dict[str, Any]:
        state = {
            "began_s": self.began_s,
            "real_s": self._real.now(),
            "curve": self.judge.curve,
            "regrouped": self._regrouped,
            "epochs_over": self._epochs_over,
        }
        return state | self.ledger.state()

    def _load(self, saved: dict[str, Any]) -> None:
        self.began_s, self.judge.curve = saved["began_s"], saved["curve"]
        self._epochs_over = saved["epochs_over"]
        self._real.restore({"now_s": saved["real_s"]})
        self.ledger.load_state(saved)

    # The end

    def end(self, own: dict[str, Any]) -> dict[str, Any]:
        """The last look, and the report; `own` is what is known of this replica before the farewell."""
        self.pulse(final=True)
        seconds, real_seconds = self.now(), self._real.now()
        with self.clock.paused():
            self.session.comm.settle()
            if self.rank.comm.rank == 0:
                tell_tensors(self.rank, self.gradients.portion)
                self.rank.tell("model", {}, b"")
            steps = self.steps_done()
            self._check_samples()
        self.epochs_are_over(steps // self.shards.steps)
        known = {
            "verdict": self.verdict,
            "real_seconds": real_seconds,
            "steps_done": steps,
            "epochs": steps / self.shards.steps,
            "stride": self.stride,
            "initial_loss": finite(self.ledger.initial_loss),
            "losses": [[finite(number) for number in entry] for entry in self.ledger.history.sums.tolist()],
            "diverged_at_step": self.ledger.diverged_at,
            "stretches": {str(k): sums for k, sums in self.ledger.by_stretch.items()},
            "curve": self.judge.curve,
            "tested": self._tested,
        }
        return report(self.session, seconds) | known | own | self.gradients.measured()

    def _check_samples(self) -> None:
        """What is reported must have been trained on: whoever emptied the pool from outside shall not go unnoticed."""
        trained = torch.tensor([self.status.samples], dtype=torch.int64)
        self.session.group.all_reduce(trained)
        epochs, steps = divmod(self.plan.steps, self.shards.steps)
        wanted = epochs * self.shards.samples + sum(map(self.shards.step_samples, range(steps)))
        if self.verdict == "finished" and not self._regrouped and int(trained) != wanted:
            raise CommError(f"the workers trained on {int(trained)} of {wanted} samples: somebody else took batches")

    def own_replica(self, values: Tensor) -> dict[str, Any]:
        """How far this replica is from the others, and how good it is by itself; all call it together."""
        with self.clock.paused(), self._real.paused():
            return self.judge.own_replica(values)
