"""`hocket demo`: the handwritten digits under several strategies, side by side."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hocket.core.errors import UserError
from hocket.measure.result import Result
from hocket.report.make import write_page
from hocket.report.records import read_records
from hocket.run.place import new_folder
from hocket.run.progress import Display
from hocket.run.spec import RunSpec
from hocket.run.train import prepare

RUNS = (("serial", 1), ("allreduce", 2), ("local-sgd:every=4", 2), ("local-sgd:every=16", 2))
EPOCHS = 200  # long enough to time: an epoch of the digits takes milliseconds


def demo(display: Display, engine: str | None) -> tuple[list[Result], Path]:
    """One result a strategy, serial first, and the folder of the runs."""
    trainings = []
    for strategy, workers in RUNS:
        spec = RunSpec("digits", strategy=strategy, workers=workers, engine=engine, epochs=EPOCHS, trace=0)
        trainings.append(prepare(spec))
    out = new_folder("demo")
    names = (f"{number}-{strategy.replace(':', '-')}" for number, (strategy, _) in enumerate(RUNS))
    results = [training.run(out / name, display=display) for training, name in zip(trainings, names, strict=True)]
    return results, out


def table(results: list[Result]) -> Table:
    """What each strategy cost and gave."""
    serial = results[0]
    title = f"{serial.task}, {serial.epochs:g} epochs, engine {serial.engine}, 2 workers (serial: 1)"
    found = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    found.caption = (
        "speedup: samples/s to serial's, whatever the accuracy; hocket compare takes the time to an accuracy"
    )
    found.caption_justify = "left"
    for column in ("strategy", "seconds", "samples/s", "speedup", "test accuracy", "bytes sent"):
        found.add_column(column, justify="left" if column == "strategy" else "right", no_wrap=True)
    for r in results:
        found.add_row(
            r.strategy,
            f"{r.seconds:.2f}",
            "–" if r.samples_per_s is None else f"{r.samples_per_s:,.0f}",
            "–" if not (r.samples_per_s and serial.samples_per_s) else f"{r.samples_per_s / serial.samples_per_s:.2f}",
            "–" if r.test_metric is None else f"{r.test_metric:.4f}",
            f"{r.bytes_sent:,}",
        )
    return found


def show(display: Display, engine: str | None, svg: Path | None = None) -> None:
    """Run the demo and print its table; with `svg`, draw it to a file too."""
    if svg is not None and (os.path.isdir(svg) or not os.access(svg.parent, os.W_OK)):
        raise UserError(f"cannot write to {svg}; name a file in a folder that exists")
    results, out = demo(display, engine)
    console = Console(highlight=False, record=svg is not None, width=80 if svg else None)
    console.print(table(results))
    if svg:
        # Without Rich's web fonts: the picture needs nothing from elsewhere.
        drawing = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title="make demo"), flags=re.DOTALL)
        svg.write_text(drawing)
    records, problems = read_records([out])
    write_page(out / "report.html", records, problems, "hocket demo")
    console.print(f"report: {out / 'report.html'}", soft_wrap=True)
