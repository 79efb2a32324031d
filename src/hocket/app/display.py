"""Progress for people: a live display in a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from hocket.core.status import Status
from hocket.run.progress import Display, Silent

MAX_LINES = 8
"""Workers shown one by one; more are only counted."""
PLAIN_S = 5.0
"""Seconds between plain lines."""


class Rates:
    """Samples a second since the last look, of each worker and of all; of a text, `words` for each sample."""

    def __init__(self, words: float | None) -> None:
        self._unit, self._each = ("samples", 1.0) if words is None else ("words", words)
        self._last: list[int] = []
        self._at = time.monotonic()
        self.each: list[float] = []

    def update(self, statuses: Sequence[Status]) -> float:
        now = time.monotonic()
        moved = [s.samples for s in statuses] != self._last  # compiled workers tell it now and then
        if (now - self._at >= 0.5 and moved) or now - self._at >= PLAIN_S or not self.each:
            before = self._last or [0] * len(statuses)
            span = max(now - self._at, 1e-9)
            self.each = [self._each * (s.samples - b) / span for s, b in zip(statuses, before, strict=True)]
            self._last, self._at = [s.samples for s in statuses], now
        return sum(self.each)

    def shown(self, rate: float) -> str:
        return f"{rate:,.0f} {self._unit}/s"


class TimeLeft:
    """How long a run will go on, by the steps since its first: what was before them is compiling and the like."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._first: tuple[float, int] | None = None

    def shown(self, step: int) -> str:
        now = time.monotonic()
        if self._first is None or not step:
            self._first = now, step
        began, at = self._first
        if step <= at:
            return ""
        seconds = round((now - began) / (step - at) * max(self._steps - step, 0))
        return f", {seconds // 60}:{seconds % 60:02d} left"


class Plain:
    """One line every few seconds on standard error."""

    def begin(self, title: str, steps: int, words: float | None = None) -> None:
        self._steps, self._metric = steps, ""
        self._rates, self._left = Rates(words), TimeLeft(steps)
        self._next = time.monotonic() + PLAIN_S
        self.note(title)

    def update(self, statuses: Sequence[Status]) -> None:
        rate, step = self._rates.update(statuses), mean_step(statuses)
        left = self._left.shown(step)
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + PLAIN_S
        done = f"{100 * step / self._steps:.0f} %" if self._steps else ""
        lr = _rate(statuses)
        self.note(f"step {step}/{self._steps} ({done}{left}), {self._rates.shown(rate)}, lr {lr}{self._metric}")

    def metric(self, name: str, value: float | None, loss: float | None) -> None:
        self._metric = f", loss {_number(loss)}, {name} {_number(value)}"

    def note(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def end(self, record: dict[str, Any]) -> None:
        pass


class Terminal:
    """A progress bar with loss, metric and speed, and a line a worker. Gone when the run is over."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._live: Live | None = None

    def begin(self, title: str, steps: int, words: float | None = None) -> None:
        self.note(title)
        self._rates = Rates(words)
        self._metric = ("metric", "–", "–")
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._bar = self._progress.add_task("training", total=steps)
        self._live = Live(self._progress, console=self._console, refresh_per_second=8, transient=True)
        self._live.start()

    def update(self, statuses: Sequence[Status]) -> None:
        rate = self._rates.update(statuses)
        self._progress.update(self._bar, completed=mean_step(statuses))
        name, value, loss = self._metric
        lines = Table.grid(padding=(0, 2))
        lines.add_row("loss", loss, name, value, "lr", _rate(statuses), self._rates.shown(rate))
        workers = Table.grid(padding=(0, 2))
        for r, status in enumerate(statuses[:MAX_LINES]):
            workers.add_row(
                f"worker {r}",
                f"step {status.step:,}",
                self._rates.shown(self._rates.each[r]),
                status.operation,
            )
        if len(statuses) > MAX_LINES:
            workers.add_row(f"and {len(statuses) - MAX_LINES} more")
        if self._live is not None:
            self._live.update(Group(self._progress, lines, workers))

    def metric(self, name: str, value: float | None, loss: float | None) -> None:
        self._metric = (name, _number(value), _number(loss))

    def note(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def end(self, record: dict[str, Any]) -> None:
        if self._live is not None:
            self._live.stop()


class AsJson(Silent):
    """The record as one JSON object on `out`, and nothing else there; what ranks print goes to standard error."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def note(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def end(self, record: dict[str, Any]) -> None:
        print(json.dumps(record), file=self._out, flush=True)


def mean_step(statuses: Sequence[Status]) -> int:
    """How far a run is: where workers do not meet, some take more steps than others."""
    return sum(s.step for s in statuses) // len(statuses)


def _rate(statuses: Sequence[Status]) -> str:
    """The learning rate, where it is known."""
    lr = statuses[0].lr
    return f"{lr:.4g}" if math.isfinite(lr) else "–"


def _number(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.4f}"


def choose(quiet: bool) -> Display:
    """The display that fits where standard error goes."""
    if quiet:
        return Silent()
    return Terminal() if sys.stderr.isatty() else Plain()
