"""One HTML file with everything in it: data, script and style."""

from __future__ import annotations

import datetime
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from hocket.core.units import counted
from hocket.report import charts, shares
from hocket.report.across import across
from hocket.report.figures import Figure
from hocket.report.records import Group, Naming, Record, comparable, told
from hocket.report.verdict import verdict
from hocket.version import __version__

_COLUMNS = (
    ("name", "setting", True), ("engine", "engine", True), ("driver", "driver", True), ("workers", "workers", False),
    ("runs", "runs", False), ("reached", "reached target", False), ("time", "s to target", False),
    ("metric", "test metric", False), ("speed", "samples/s", False), ("seconds", "s trained", False),
    ("megabytes", "MB sent", False), ("stale", "mean staleness", False), ("verdicts", "verdicts", True),
)  # fmt: skip


@dataclass(frozen=True)
class Story:
    """What a study tells beside what its runs show by themselves."""

    question: str = ""
    says: str = ""
    figures: Sequence[Mapping[str, Any]] = ()
    """Asked for; see `across`."""
    extra: Sequence[Figure] = ()
    """Drawn already."""
    notes: Sequence[str] = ()
    """What was left out, and why."""
    title: str = ""
    """Of the page, unless the reader gives one."""


def page_data(
    records: Sequence[Record], problems: Sequence[str], title: str, story: Story | None = None
) -> dict[str, Any]:
    """What the page shows, as JSON: a section a task and kind of time, which are never mixed."""
    story = story or Story()
    sections: list[dict[str, Any]] = []
    words: list[str] = []
    for task, clock, groups in comparable(records):
        words += verdict(groups, clock)
        sections.append(_section(task, groups, clock, story.figures))
    if story.extra:
        names = dict.fromkeys(series.name for figure in story.extra for series in figure.series)
        colours = {name: number for number, name in enumerate(names)}
        figures = [figure.to_json() for figure in story.extra]
        sections.append(_plain("How it works", figures=figures, colours=colours))
    if problems or story.notes:
        sections.append(_plain("Left out", notes=[*story.notes, *problems]))
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
    made = f"{counted(len(records), 'run')}; made {now} with Hocket {__version__}."
    told = [line for line in (story.question, *words, story.says) if line]
    return {"title": title, "verdict": told, "sections": sections, "made": made}


def _plain(title: str, **parts: Any) -> dict[str, Any]:
    return {"title": title, "says": "", "figures": [], "table": None, "notes": []} | parts


def figures_of(groups: Sequence[Group], clock: str, asked: Sequence[Mapping[str, Any]] = ()) -> list[Figure]:
    """All figures that these runs can be shown in; first those that were asked for."""
    one = [
        *(across(groups, figure, clock, number) for number, figure in enumerate(asked)),
        *charts.times_to_targets(groups, clock),
        charts.speedup(groups, clock),
        *charts.learning(groups, clock),
        shares.time_split(groups, clock),
        shares.worker_split(groups, clock),
        charts.staleness(groups),
        charts.consensus(groups),
        *charts.heat_maps(groups),
    ]
    return [figure for figure in one if figure is not None]


def _section(task: str, groups: Sequence[Group], clock: str, asked: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    kind = "simulated: times are virtual" if clock.startswith("virtual") else "measured"
    figures = figures_of(groups, clock, asked)
    begins = [name for figure in figures for name in figure.begins]
    names = dict.fromkeys([*begins, *(group.name for group in groups)])  # what is drawn at first has colours of its own
    columns = [{"key": key, "label": label, "text": text} for key, label, text in _COLUMNS]
    return {
        "title": f"{task} ({kind})",
        "says": _lead(groups),
        "figures": [figure.to_json() for figure in figures],
        "table": {"columns": columns, "rows": [_row(group) for group in groups]},
        "colours": {name: number for number, name in enumerate(names)},
        "notes": [],
    }


def _lead(groups: Sequence[Group]) -> str:
    usual = Naming.of([group.first for group in groups]).usual
    says = "Lines are medians over seeds, bands their range"
    stopped = any(record["verdict"] == "reached-target" for group in groups for record in group.records)
    says += "; a run that stopped at its target keeps its last value." if stopped else "."
    return says + (f" Where a name does not say otherwise: {told(usual)}." if usual else "")


def _row(group: Group) -> dict[str, Any]:
    first, there = group.first, group.reached == len(group.records)
    stale = [r["staleness"]["mean"] for r in group.good if r["staleness"]]
    sent = group.median("bytes_sent")
    return {
        "name": group.name,
        "engine": first["engine"],
        "driver": first["driver"],
        "workers": first["workers"],
        "runs": len(group.records),
        "reached": group.reached if first["target"] is not None else None,
        "time": charts.spread(group.times)[0] if there else None,
        "metric": group.median("metric"),
        "speed": group.median("samples_per_s"),
        "seconds": group.median("seconds"),
        "megabytes": None if sent is None else sent / 1e6,
        "stale": sum(stale) / len(stale) if stale else None,
        "verdicts": ", ".join(dict.fromkeys(str(r["verdict"]) for r in group.records)),
        "bad": len(group.good) < len(group.records),
    }


def render(data: dict[str, Any], live: str = "") -> str:
    """The page. What users wrote (names of tasks, runs, strategies) stays text: it never becomes markup."""
    source = files("hocket.report")
    style, script = ((source / name).read_text() for name in ("page.css", "page.js"))
    packed = (
        json.dumps(data, allow_nan=False)
        .replace("<", "\\u003c")
        .replace("\u2028", "\\u2028")
        .replace("\u2029", "\\u2029")
    )
    title = html.escape(data["title"])
    guard = (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'"
    )
    mark = f' data-live="{html.escape(live)}"' if live else ""
    return (
        f'<!doctype html>\n<html lang="en"{mark}>\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{guard}">\n'
        f"<title>{title}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f'<header><h1>{title}</h1><button id="theme" type="button">light / dark</button></header>\n'
        f'<section id="verdict" aria-label="Verdict"></section>\n<main id="content"></main>\n'
        f'<script type="application/json" id="data">{packed}</script>\n<script>\n{script}</script>\n</body>\n</html>\n'
    )
