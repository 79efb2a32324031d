"""The command `hocket study`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hocket.app.options import pairs
from hocket.core.units import counted


def study(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="A study, or a file of your own, study.toml. [show them all]")
    ] = "",
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that all its runs get.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick/--full", help="A small grid for minutes on 2 cores, or all of it.")
    ] = True,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Run those now that have this setting, and the rest another time."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder; a study goes on with what is there. [runs/study-NAME-quick]", show_default=False),
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Write each figure there, as SVG and PNG.", show_default=False)
    ] = None,
) -> None:
    """Run a grid of trainings that answers a question, and write a report. The same command goes on after a stop."""
    from hocket.lab.design import built_in

    if not name:
        for known, question in built_in().items():
            typer.echo(f"{known:20}{question}")
        return
    _run(name, pairs(words or [], "a setting"), pairs(only or [], "--only"), quick, out, figures)


def _run(
    name: str, changes: dict[str, str], only: dict[str, str], quick: bool, out: Path | None, figures: Path | None
) -> None:
    from hocket.app.display import choose
    from hocket.lab import collectives_study
    from hocket.lab import study as lab
    from hocket.lab.design import find, read
    from hocket.report.answer import PAGE, check, write_answer

    asked = read(find(name), quick, changes)
    check(asked)
    out = out or Path("runs") / f"study-{asked.name}{'-quick' * quick}"
    display = choose(quiet=False)
    try:
        outcome = lab.run(asked, out, display, only)
        rows, notes = collectives_study.run(asked.collectives, out, display) if asked.collectives else ([], [])
        outcome.notes += notes
    except KeyboardInterrupt:
        display.note(f"stopped; the same command goes on with the runs in {out}")
        raise
    write_answer(out, asked, outcome.folders, outcome.notes, rows, figures)
    for note in outcome.notes:
        typer.echo(f"left out: {note}", err=True)
    typer.echo(f"{counted(len(outcome.folders), 'run')}; table: {out / 'table.csv'}; report: {out / PAGE}")
