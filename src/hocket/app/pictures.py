"""Commands that show runs: `hocket report` and `hocket watch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hocket.core.errors import UserError
from hocket.core.units import counted

Folders = Annotated[list[Path], typer.Argument(metavar="RUNS...", help="Folders of runs, or folders that hold some.")]


def report(
    runs: Folders,
    out: Annotated[Path | None, typer.Option(help="The page. [report.html in the first folder]")] = None,
    figures: Annotated[Path | None, typer.Option(help="Write each figure there, as SVG and PNG.")] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="Write TensorBoard event files there.")] = None,
    title: Annotated[str, typer.Option(help="Of the page. [the first folder's name]")] = "",
) -> None:
    """Make one HTML page of runs that opens offline: a verdict in words, figures and a table."""
    from hocket.report.answer import PAGE, story_of
    from hocket.report.make import write_figures, write_page
    from hocket.report.page import Story
    from hocket.report.records import read_records

    story, problems = story_of(runs[0]) if len(runs) == 1 else (Story(), [])
    try:
        records, damaged = read_records(runs)
    except UserError:
        if not story.extra:  # what a study shows without training
            raise
        records, damaged = [], []
    problems += damaged
    for line in problems:
        typer.echo(f"hocket: {line}", err=True)
    path = out or runs[0] / PAGE
    write_page(path, records, problems, title or story.title or runs[0].resolve().name, story)
    typer.echo(f"{counted(len(records), 'run')} in {path}")
    if figures:
        typer.echo(f"{write_figures(figures, records, story)} figures in {figures}")
    if tensorboard:
        from hocket.report.tensorboard import write_events

        typer.echo(f"{counted(write_events(tensorboard, records), 'run')} for TensorBoard in {tensorboard}")


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN_OR_STUDY", help="The folder that something is being written to.")],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of the page, on this machine only. [any that is free]")
    ] = 0,
) -> None:
    """Show a run or a study in the browser while it goes on; ends with Ctrl-C."""
    from hocket.report.live import serve

    serve(run, port, lambda address: typer.echo(f"watching {run} at {address} (Ctrl-C ends it)"))
