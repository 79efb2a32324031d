"""A stretch of some timelines (timeline.json of `hocket train --timeline`) as one SVG, on one scale.

    python bench/draw_timeline.py OUT.svg STEP STEPS TITLE=TIMELINE.json ...

Each is drawn from the beginning of a step on, for so many steps of the first one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

WIDTH, LEFT, HEIGHT, GAP = 900, 190, 22, 6
COLOURS = {
    "forward": "#9ecae9", "backward": "#4c78a8", "step": "#54a24b", "encode": "#b279a2", "decode": "#d6a5c9",
    "wait": "#bab0ac",
}  # fmt: skip
TRAVELS = "#f58518"
FONT = 'font-family="sans-serif" font-size="12"'

Event = dict[str, Any]


def spans_of(path: Path) -> list[Event]:
    events = json.loads(path.read_text())["traceEvents"]
    return sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"]))


def begins(spans: list[Event]) -> list[float]:
    """When the first rank begins each of its steps."""
    return [e["ts"] for e in spans if e["name"] == "gradient" and e["pid"] == 0]


def colour(event: Event) -> str | None:
    name = event["name"]
    return COLOURS.get(name) or (TRAVELS if event["cat"] == "communication" else None)


def drawn(out: Path, step: int, steps: int, files: dict[str, Path]) -> None:
    found = {title: spans_of(path) for title, path in files.items()}
    first = begins(next(iter(found.values())))
    shown = first[step + steps] - first[step]
    scale, y, parts = (WIDTH - LEFT - 10) / shown, 24, []
    for title, spans in found.items():
        parts.append(f'<text x="4" y="{y - 8}" {FONT} font-weight="bold">{title}</text>')
        begin = begins(spans)[step]
        for pid, tid in sorted({(e["pid"], e["tid"]) for e in spans}):
            lane = f"worker {pid}" + (", background" if tid else "")
            parts.append(f'<text x="4" y="{y + 15}" {FONT}>{lane}</text>')
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 10}" height="{HEIGHT}" fill="#f4f4f4"/>')
            for e in spans:
                x, end = e["ts"] - begin, e["ts"] + e["dur"] - begin
                if (e["pid"], e["tid"]) == (pid, tid) and end >= 0 and x < shown and colour(e):
                    x, end = max(x, 0.0), min(end, shown)
                    box = f'x="{LEFT + x * scale:.1f}" width="{max((end - x) * scale, 0.5):.1f}"'
                    told = f"<title>{e['name']}, {e['dur'] / 1000:.2f} ms</title>"
                    parts.append(f'<rect {box} y="{y}" height="{HEIGHT}" fill="{colour(e)}">{told}</rect>')
            y += HEIGHT + GAP
        y += 26
    legend = {"forward": None, "backward": None, "communication": TRAVELS, "wait": None, "step": None}
    for i, (name, fill) in enumerate(legend.items()):
        x = LEFT + 120 * i
        parts.append(f'<rect x="{x}" y="{y - 16}" width="12" height="12" fill="{fill or COLOURS[name]}"/>')
        parts.append(f'<text x="{x + 17}" y="{y - 6}" {FONT}>{name}</text>')
    parts.append(f'<text x="{WIDTH - 90}" y="{y - 6}" {FONT}>{shown / 1000:.0f} ms wide</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 4}">'
    background = f'<rect width="{WIDTH}" height="{y + 4}" fill="white"/>'
    out.write_text("\n".join([head, background, *parts, "</svg>"]) + "\n")


if __name__ == "__main__":
    target, number, count, *named = sys.argv[1:]
    pairs = (word.rsplit("=", 1) for word in named)
    drawn(Path(target), int(number), int(count), {title: Path(path) for title, path in pairs})
