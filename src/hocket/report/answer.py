"""The folder of a study, completed: table.csv, table.parquet and report.html."""

from __future__ import annotations

import io
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hocket.core.errors import UserError
from hocket.core.registry import unknown
from hocket.lab.design import Study
from hocket.lab.study import STUDY, write_down
from hocket.measure import disk
from hocket.report import across
from hocket.report.charts import ring_steps
from hocket.report.figures import Axis, Figure, Series
from hocket.report.formulas import communication
from hocket.report.frame import frame_of
from hocket.report.make import write_figures, write_page
from hocket.report.page import Story
from hocket.report.records import Record, read_records

PAGE = "report.html"
_DRAWINGS: Mapping[str, Callable[[], Figure]] = {"ring": ring_steps, "communication": communication}


def check(study: Study) -> None:
    """Refuse what its report could not show, before anything runs."""
    across.check(study.figures)
    for name in study.draws:
        if name not in _DRAWINGS:
            raise UserError(f"draws: {unknown('drawing', name, _DRAWINGS)}")


def write_answer(
    out: Path, study: Study, folders: Sequence[Path], notes: Sequence[str], rows: Sequence[Mapping[str, Any]] = (),
    figures: Path | None = None,
) -> None:  # fmt: skip
    """`rows` are what was measured beside trainings: see lab/collectives_study.py."""
    write_down(out, study, notes, rows, over=True)
    records, problems = read_records(folders) if folders else ([], [])
    if not records and not rows:
        why = f": {notes[0]}" if notes else ""
        raise UserError(f"nothing of the study {study.name} can run here{why}")
    _write_table(out, records, rows)
    story, _ = story_of(out)
    write_page(out / PAGE, records, problems, story.title, story)
    if figures:
        write_figures(figures, records, story)


def story_of(folder: Path) -> tuple[Story, list[str]]:
    """What the study in a folder tells beside its runs, if there is one, and a line if it could not be read."""
    path = folder / STUDY
    if not path.is_file():
        return Story(), []
    try:
        told = json.loads(path.read_text())
        across.check(told["figures"])
        extra = [*_collectives(told["rows"]), *(_DRAWINGS[name]() for name in told["draws"])]
        texts, notes = (str(told["question"]), str(told["says"])), [str(note) for note in told["notes"]]
        if not told["over"]:
            notes.append(f"This study of {len(told['cells']) * told['seeds']} runs is not over; its command goes on.")
        return Story(*texts, told["figures"], extra, notes, title=f"study: {told['study']}"), []
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError) as error:
        why = f"it has no {error}; was it written by another version?" if isinstance(error, KeyError) else error
        return Story(), [f"{path} cannot be read, so the study's own figures are left out: {why}"]


def _write_table(out: Path, records: Sequence[Record], rows: Sequence[Mapping[str, Any]]) -> None:
    frame = frame_of(records)
    if rows:
        frame = type(frame)(rows)
    packed = io.BytesIO()
    try:
        frame.to_parquet(packed, index=False)
    except ImportError:
        raise UserError("table.parquet needs pyarrow; install it with: pip install 'hocket[report]'") from None
    disk.write(out / "table.csv", frame.to_csv(index=False).encode())
    disk.write(out / "table.parquet", packed.getvalue())


def _collectives(rows: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Time against ranks and size, by kind of time; steps and bytes, which are the same in both."""
    found: list[Figure] = []
    for simulated in (False, True):
        chosen = [row for row in rows if row["simulated"] == simulated]
        if not chosen:
            continue
        clock, kind = ("virtual time", "simulated") if simulated else ("time", "measured")
        most, largest = max(row["ranks"] for row in chosen), max(row["bytes"] for row in chosen)
        time, ranks = Axis(f"{clock} of one sum, s", "log"), Axis("ranks", "log", values=True)
        of_largest = [row for row in chosen if row["bytes"] == largest]
        title = f"One sum of {_size(largest)}, {kind}"
        found.append(_figure(f"sum-ranks-{kind}", title, ranks, time, of_largest, "ranks", "seconds"))
        title, size = f"One sum over {most} ranks, {kind}", Axis("size of the vector, KiB", "log", values=True)
        of_most = [{**row, "kib": row["bytes"] / 1024} for row in chosen if row["ranks"] == most]
        found.append(_figure(f"sum-size-{kind}", title, size, time, of_most, "kib", "seconds"))
        if simulated or not any(row["simulated"] for row in rows):
            said, sent = "messages that the busiest rank sends", "messages_of_busiest_rank"
            found.append(_figure("sum-steps", "Steps", ranks, Axis(said, "log"), of_largest, "ranks", sent))
            of_largest = [{**row, "copies": row["bytes_of_busiest_rank"] / row["bytes"]} for row in of_largest]
            title, said = "Bytes through one network card", "sent by the busiest rank, times the vector's size"
            found.append(_figure("sum-bytes", title, ranks, Axis(said, "log"), of_largest, "ranks", "copies"))
    return [figure for figure in found if any(len(series.x) > 1 for series in figure.series)]


def _figure(
    name: str, title: str, x: Axis, y: Axis, rows: Sequence[Mapping[str, Any]], against: str, measure: str
) -> Figure:
    lines: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row[measure]:  # the library does not say how many messages it sends
            lines[row["way"]].append(row)
    series = []
    for way, entries in lines.items():
        entries = sorted(entries, key=lambda row: row[against])
        ends = ("least_s", "most_s") if measure == "seconds" and not entries[0]["simulated"] else ()
        low, high = ([row[end] for row in entries] for end in ends) if ends else ([], [])
        series.append(Series(way, [row[against] for row in entries], [row[measure] for row in entries], low, high,
                             points=True))  # fmt: skip
    return Figure(name, title, "lines", x, y, series, command="hocket study collectives")


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:g} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:g} KiB"
