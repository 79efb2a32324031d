"""A result in a few lines, for people."""

from __future__ import annotations

import shlex

from rich.console import Console
from rich.table import Table

from hocket.core.units import counted
from hocket.measure.result import TIMES, Result

_IN_WORDS = {"waiting": "waiting for others", "locks": "waiting for locks"}


def summary(result: Result) -> None:
    """The result in a few lines."""

    def number(value: float | None, form: str = ".4f") -> str:
        return "–" if value is None else format(value, form)

    table = Table(box=None, show_header=False)
    time = f"{result.seconds:.2f} s"
    if result.virtual_seconds is not None:
        time = f"{result.virtual_seconds:.4g} s of virtual time ({time} of real)"
    rows = [
        ("verdict", _verdict(result)),
        ("time", time),
        ("start-up", number(result.startup_seconds, ".1f") + " s, outside that time"),
        ("engine", f"{result.engine}, {result.driver}"),
        ("samples/s", number(result.samples_per_s, ",.0f"))
        if result.words_per_s is None
        else ("words/s", number(result.words_per_s, ",.0f")),
        ("steps", f"{result.steps:,} ({counted(result.epochs, 'epoch')})"),
        ("train loss", number(result.train_loss)),
        ("test loss", number(result.test_loss)),
        *((f"test {name}", number(value)) for name, value in result.metrics.items()),
        *((f"train {name}", number(value)) for name, value in result.train_metrics.items()),
        *_validation(result),
        ("bytes sent", f"{result.bytes_sent:,}"),
        *_communication(result),
    ]
    rows += _asynchrony(result)
    if result.target is not None:
        reached = "not reached" if result.time_to_target is None else f"after {result.time_to_target:.4g} s"
        rows.append((f"target {result.target:g}", reached))
    if result.out:
        rows.append(("record", result.out))
    for name, value in rows:
        table.add_row(name, value)
    Console(highlight=False).print(table)
    for r, worker in enumerate(result.per_worker[:8]):
        parts = ", ".join(f"{worker[k]:.2f} s {_IN_WORDS.get(k, k)}" for k in TIMES if worker[k])
        batches = f"{worker['steps']:,} batches, " if result.shared else ""  # each takes as many as it can
        print(f" worker {r}: {batches}{parts}")
    if result.out:
        print(f"see it: hocket report {shlex.quote(result.out)}")


def _verdict(result: Result) -> str:
    """How it ended, and where all losses were finite but it came to nothing, that too."""
    if result.learnt or result.verdict == "diverged":
        return result.verdict
    return f"{result.verdict}, but it has learnt nothing"


def _validation(result: Result) -> list[tuple[str, str]]:
    """What the run went by, where that was not the test samples; and its best, where that was not the end."""
    rows = []
    if result.looks_at == "validation":
        found = {"loss": result.validation_loss} | result.validation_metrics
        rows = [(f"validation {name}", "–" if value is None else f"{value:.4f}") for name, value in found.items()]
    if result.best is not None and result.best["epoch"] != result.epochs:
        value, epoch = result.best["metric"], result.best["epoch"]
        rows.append(("best", f"{result.looks_at} {result.metric} {value:.4f} after {counted(epoch, 'epoch')}"))
    return rows


def _communication(result: Result) -> list[tuple[str, str]]:
    """Of the worker that was held up longest, where something was hidden behind computing."""
    worker = max(result.per_worker, key=lambda one: one.get("exposed", 0.0), default={})
    travelled, exposed = worker.get("communicating", 0.0), worker.get("exposed", 0.0)
    if travelled <= exposed:
        return []
    return [("communication", f"{travelled:.3g} s of a worker's data on its way, {exposed:.3g} s of it exposed")]


def _asynchrony(result: Result) -> list[tuple[str, str]]:
    """Where workers do not wait for each other: how stale the updates were, and what became of them."""
    rows = []
    found, most = result.shared, result.staleness["max"]
    if most or found:
        beyond = found is not None and most == 255 and result.virtual_seconds is None  # the last bin of real engines
        mean = f"{'at least ' * beyond}{result.staleness['mean']:.2f} on average"
        rows.append(("staleness", f"{mean}, {f'some {most} or more' if beyond else f'{most} at most'}"))
    if found is None:
        return rows
    rows.append(("updates", f"{found['updates']:,} ({found['updates_per_s']:,.0f}/s), {found['dropped']:,} dropped"))
    if found["lost_movement"]:
        rows.append(("lost movement", f"{found['lost_movement']:.2%} of it, where workers wrote at once"))
    tries = sum(int(k) * n for k, n in found["failed_tries"].items())
    if found["failed_tries"]:
        rows.append(("failed tries", f"{tries:,} compare-and-swaps"))
    if found["lock_wait_s"]:
        rows.append(("lock wait", f"{found['lock_wait_s']:.4g} s, all workers together"))
    rows.append(("vectors alive", f"{found['peak_vectors']} at the peak"))
    times = [f"{part} % after {s:.4g} s" for part, s in result.time_to_loss.items() if s is not None]
    rows.append(("of initial loss", ", ".join(times) or "75 % not reached"))
    return rows
