"""Write the page and the figures of a set of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hocket.core.errors import UserError
from hocket.measure import disk
from hocket.report.figures import Figure
from hocket.report.page import Story, figures_of, page_data, render
from hocket.report.records import Record, comparable


def write_page(
    path: Path, records: Sequence[Record], problems: Sequence[str], title: str, story: Story | None = None
) -> None:
    content = render(page_data(records, problems, title, story))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        disk.write(path, content.encode())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; choose another --out") from None


def write_figures(folder: Path, records: Sequence[Record], story: Story | None = None) -> int:
    """Each figure as FOLDER/TASK-NAME.svg and .png; returns how many."""
    from hocket.report.static import save

    story = story or Story()
    found: list[tuple[str, Figure]] = [("", figure) for figure in story.extra]
    for task, clock, groups in comparable(records):
        found += [(task, figure) for figure in figures_of(groups, clock, story.figures)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for task_name, figure in found:
            save(figure, folder / ("-".join(filter(None, [_fit(task_name), figure.name]))))
    except OSError as error:
        raise UserError(f"cannot write figures to {folder}: {error.strerror or error}") from None
    return len(found)


def _fit(name: str) -> str:
    """A name that users gave, fit for a file's."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name)[:60]
