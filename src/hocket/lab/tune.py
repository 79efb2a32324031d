"""`hocket tune`: the settings that suit a strategy best, by successive halving (Jamieson 2016)."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hocket.core.errors import UserError
from hocket.core.units import counted
from hocket.engines.catalogue import engine
from hocket.lab.axes import Values, Wish, applied, candidates, described, fitting, read
from hocket.lab.runs import Runs
from hocket.run.place import make_folder
from hocket.run.progress import Display
from hocket.run.resolve import resolve
from hocket.run.spec import RunSpec
from hocket.run.train import Training, prepare
from hocket.tasks import Task

BUDGET = 8.0
"""What tuning may spend on a strategy, in trainings of full length."""
SEEDS_BEGIN = 1000
"""So far behind the seed of a run are those that it is tuned on."""
DIVERGED = "every candidate diverged; give --tune lower values"


def plan(spec: RunSpec, texts: Sequence[str], budget: float, own: Task | None = None) -> Tuning:
    """How to tune one run. Refuses what cannot run, before anything does."""
    if not texts:
        raise UserError("say what is tuned, such as lr")
    training = prepare(spec, own)
    found = tuning_of(training, read(texts, [training.spec.strategy]), budget, spec.seed + SEEDS_BEGIN, own)
    assert found is not None, "whatever is tuned fits the only strategy"
    return found


def tuning_of(
    training: Training, wishes: Sequence[Wish], budget: float, first_seed: int, own: Task | None
) -> Tuning | None:
    """The tuning of one run; None where none of the wishes is for its strategy."""
    if not (math.isfinite(budget) and budget > 0):
        raise UserError(f"--budget must be a number of full trainings above 0, got {budget:g}")
    if launcher := next((found for name in engine if (found := engine[name].launched_by())), ""):
        raise UserError(f"tuning starts runs of its own and cannot be started by {launcher}; use --hosts")
    if not fitting(wishes, training.spec.strategy):
        return None
    tuning = Tuning(training, candidates(wishes, training), budget, first_seed, own)
    tuning.check()
    return tuning


@dataclass(frozen=True)
class Rung:
    """One round of the halving: so many candidates, each trained so often for this part of the full length."""

    candidates: int
    seeds: int
    part: float


def rungs(count: int, budget: float) -> list[Rung]:
    """Each rung gets an equal share of the budget, and has half the candidates of the one before, down to 2."""
    sizes = [count]
    while sizes[-1] > 2:
        sizes.append(-(-sizes[-1] // 2))
    shares = [budget / (len(sizes) * size) for size in sizes]
    return [Rung(n, max(1, int(share)), min(1.0, share)) for n, share in zip(sizes, shares, strict=True)]


@dataclass
class Candidate:
    """Values that were tried, and what came of them on the highest rung that they reached."""

    values: Values
    rung: int = 0
    epochs: float = 0.0
    runs: Runs = field(default_factory=Runs)

    def to_json(self) -> dict[str, Any]:
        looks_at = self.runs.results[0].looks_at if self.runs.results else "test"
        return {
            "values": dict(self.values),
            "rung": self.rung,
            "epochs": self.epochs,
            "seeds": [r.seed for r in self.runs.results],
            f"{looks_at}_metric": [r.judged_metric for r in self.runs.results],
            "time_to_target": [r.time_to_target for r in self.runs.results],
            "verdicts": [r.verdict for r in self.runs.results],
            "samples": self.runs.samples,
            "seconds": sum(r.seconds for r in self.runs.results),
        }


@dataclass
class Tuning:
    """How one strategy with one number of workers is tuned: all can start. `run` fills in the trials."""

    training: Training
    """The run whose settings are tuned."""
    grid: list[Values]
    budget: float
    first_seed: int
    own: Task | None = None
    """The user's object, where the task is one."""
    trials: list[Candidate] = field(default_factory=list)
    """One for each candidate of each rung."""

    @property
    def ranking(self) -> list[Candidate]:
        """Every candidate as it was last seen, the best first."""
        last = {tuple(trial.values.items()): trial for trial in self.trials}
        lower = self.training.task.lower_is_better
        return sorted(last.values(), key=lambda c: (c.runs.diverged, -c.rung, *c.runs.order(lower)))

    @property
    def best(self) -> Values:
        """Empty before anything was tried, and where all that was tried diverged."""
        return next((c.values for c in self.ranking if not c.runs.diverged), {})

    @property
    def samples(self) -> int:
        """What it has cost."""
        return sum(trial.runs.samples for trial in self.trials)

    @property
    def seconds(self) -> float:
        """Of real training time."""
        return sum(r.seconds for trial in self.trials for r in trial.runs.results)

    def run(self, out: Path | None, force: bool, display: Display) -> dict[str, Any]:
        """Tune, and write tune.json, whose content it returns."""
        if out:
            make_folder(out, force)
        try:
            self.halve(display)
        finally:
            if out:
                (out / "tune.json").write_text(json.dumps(self.to_json(), indent=1) + "\n")
        return self.to_json()

    def halve(self, display: Display) -> None:
        """Train the candidates, for longer and longer, and let the better half go on each time."""
        spec, alive = self.training.spec, self.grid
        who = f"{spec.strategy} on {counted(self.training.plan.workers, 'worker')}"
        for number, rung in enumerate(rungs(len(self.grid), self.budget), 1):
            alive = alive[: rung.candidates]
            display.note(f"tuning {who}, rung {number}: {len(alive)} candidates, {self._length(rung)} each")
            self.trials += [self._try(values, number, rung, display) for values in alive]
            alive = [c.values for c in self.ranking if c.rung == number and not c.runs.diverged]
            if not alive:
                break
        display.note(f"tuned {who}: {described(self.best) + self.doubts() if self.best else DIVERGED}")

    def doubts(self) -> str:
        """A word of warning where the best learning rate is the last one tried, or no trial had the full length."""
        found = []
        tried = sorted({values["lr"] for values in self.grid if "lr" in values})
        if tried and (best := self.best.get("lr")) in (tried[0], tried[-1]):
            found.append(f"no {'lower' if best == tried[0] else 'higher'} lr was tried")
        steps = rungs(len(self.grid), self.budget)
        if steps[-1].part < 1:
            most, enough = f"{100 * steps[-1].part:.3g}%", math.ceil(self.budget / steps[-1].part)
            found.append(f"no trial had more than {most} of the full length; --budget {enough} would do")
        return f" ({'; '.join(found)})" if found else ""

    def _try(self, values: Values, number: int, rung: Rung, display: Display) -> Candidate:
        found = Candidate(values, number)
        for seed in range(self.first_seed, self.first_seed + rung.seeds):
            training = self._prepared(values, seed, rung)
            found.epochs = training.epochs
            found.runs.add(training.run(display=display))
            if found.runs.diverged:
                break
        return found

    def _prepared(self, values: Values, seed: int, rung: Rung) -> Training:
        spec = applied(self.training.spec, values)
        whole = resolve(spec, self.training.task, len(self.training.train)).steps
        steps = max(1, round(rung.part * whole))  # and not epochs: all get the same whatever their number
        changes: dict[str, Any] = dict(seed=seed, epochs=None, steps=steps, trace=0, checkpoint_every="")
        return prepare(dataclasses.replace(spec, **changes), self.own)

    def _length(self, rung: Rung) -> str:
        length = f"{rung.part * self.training.epochs:.3g} epochs"
        return length if rung.seeds == 1 else f"{rung.seeds} runs of {length}"

    def check(self) -> None:
        """Refuse values that cannot run."""
        for values in self.grid:
            resolve(applied(self.training.spec, values), self.training.task, len(self.training.train))
        for values in (self.grid[0], self.grid[-1]):  # the ends stand for the rest: a model and data for each take time
            prepare(applied(self.training.spec, values), self.own)

    def to_json(self) -> dict[str, Any]:
        spec = self.training.spec
        return {
            "task": spec.task,
            "strategy": spec.strategy,
            "workers": spec.workers,
            "engine": spec.engine,
            "driver": self.training.plan.driver,
            "best": dict(self.best) or None,
            "samples": self.samples,
            "seconds": self.seconds,
            "budget": self.budget,
            "trials": [trial.to_json() for trial in self.trials],
        }
