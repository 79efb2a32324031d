"""The command that shows how a layout splits a model: `hocket layout`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from hocket.app.options import collected, takes_settings


@takes_settings("train")
def layout(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TASK] [KEY=VALUE]...", help="A task, or path/to/file.py:task; then settings."),
    ] = None,
    **settings: Any,
) -> None:
    """Show how a layout splits a task's model, and the bytes that a step of training sends."""
    from rich.console import Console

    from hocket.app.layout_table import rows, summary
    from hocket.run.train import prepare

    training = prepare(collected(words or [], settings, None))
    Console(highlight=False, width=250).print(rows(training))
    print(summary(training))
