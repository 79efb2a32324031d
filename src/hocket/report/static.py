"""Figures as files, by matplotlib: for papers, slides and notebooks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.core.errors import UserError
from hocket.report.figures import Axis, Figure, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#2f9bd6", "#6b4fa3", "#4d4d4d")
"""Told apart by colour-blind readers too (after Okabe and Ito)."""
_BESIDE = 6
"""Series from which on their names stand beside the axes, where they cover nothing."""
_SIDES = (
    *((5, 2, "left"), (5, -7, "left"), (-5, 2, "right"), (-5, -7, "right"), (0, 6, "center"), (0, -11, "center")),
    *((-5, 10, "left"), (-5, -15, "left"), (5, 10, "right"), (5, -15, "right")),
)
"""Of a point, where its name may stand."""
_STYLES = {"solid": "-", "dashed": "--", "dotted": ":"}


def save(figure: Figure, path: Path) -> None:
    """As path.svg and path.png."""
    drawn = draw(figure)
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none"}):  # text that can be searched, in a file a tenth as large
        for suffix in (".svg", ".png"):
            drawn.savefig(f"{path}{suffix}", dpi=160, bbox_inches="tight")


def draw(figure: Figure) -> Any:
    """A matplotlib figure."""
    try:
        from hocket.report.canvas import Canvas
    except ImportError:
        raise UserError("figures as files need matplotlib; install it with: pip install 'hocket[report]'") from None
    if figure.begins:
        figure = dataclasses.replace(figure, series=[one for one in figure.series if one.name in figure.begins])
    figure = _without_formulas(figure)
    rows = len({x for series in figure.series for x in series.x}) if figure.kind in ("bars", "stacks") else 0
    canvas = Canvas(figsize=(7.2, max(4.4, 1.2 + 0.22 * rows)), layout="constrained")
    axes = canvas.add_subplot()
    _KINDS[figure.kind](axes, figure)
    axes.set_title(figure.title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    if figure.kind in ("lines", "bars", "stacks"):
        axes.grid(axis="y" if figure.kind == "lines" else "x", alpha=0.3)
        if len(figure.series) > _BESIDE and not _is_scatter(figure):
            canvas.set_figwidth(9.6)
            canvas.legend(loc="outside right upper", fontsize=7, frameon=False)
        elif len(figure.series) > 1 and not _is_scatter(figure):
            columns = 3 if max(len(one.name) for one in figure.series) < 24 else 2
            canvas.legend(loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    return canvas


def _without_formulas(figure: Figure) -> Figure:
    """Matplotlib takes text between dollars for a formula, and users' names are none."""

    def plain(text: Any) -> Any:
        return text.replace("$", r"\$") if isinstance(text, str) else text

    return dataclasses.replace(
        figure,
        title=plain(figure.title),
        x=dataclasses.replace(figure.x, label=plain(figure.x.label)),
        y=dataclasses.replace(figure.y, label=plain(figure.y.label)),
        series=[dataclasses.replace(one, name=plain(one.name), x=[*map(plain, one.x)]) for one in figure.series],
    )


def _is_scatter(figure: Figure) -> bool:
    return figure.kind == "lines" and all(len(series.x) == 1 for series in figure.series)


def _label(axes: Axes, figure: Figure) -> None:
    axes.set_xlabel(figure.x.label)
    axes.set_ylabel(figure.y.label)
    if figure.y.percent:
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")


def _scale(axes: Axes, figure: Figure) -> None:
    _one_scale(figure.x, axes.set_xscale, axes.xaxis, [x for one in figure.series for x in one.x])
    if figure.x.values:
        values = sorted({x for series in figure.series for x in series.x})
        axes.set_xticks(values, [f"{value:g}" for value in values], minor=False)
        axes.xaxis.minorticks_off()
    _one_scale(
        figure.y, axes.set_yscale, axes.yaxis, [y for one in figure.series for y in [*one.y, *one.low, *one.high]]
    )


def _one_scale(axis: Axis, set_scale: Any, ticks: Any, values: list[Any]) -> None:
    """The shorter a log axis, the more of its values are named."""
    if axis.scale == "log":
        from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

        set_scale("log")
        shown = [value for value in values if value is not None and value > 0]
        times = max(shown) / min(shown) if shown else 1.0
        few = (1, 2, 5) if times > 20 else (1, 1.5, 2, 3, 4, 5, 6, 8)
        ticks.set_major_locator(LogLocator(subs=few) if times > 2 else MaxNLocator(5))
        ticks.set_major_formatter(lambda value, _: f"{value:g}")
        ticks.set_minor_formatter(NullFormatter())


def _colour(series: Series, number: int) -> str:
    return "#777777" if series.ideal else COLOURS[number % len(COLOURS)]


def _numbers(values: list[Any]) -> list[float]:
    return [float("nan") if value is None else float(value) for value in values]


def _lines(axes: Axes, figure: Figure) -> None:
    _scale(axes, figure)
    for number, series in enumerate(figure.series):
        colour, marker = _colour(series, number), "o" if series.points else ""
        again = ("solid", "dashed", "dotted")[min(number // len(COLOURS), 2)]  # when the colours begin anew
        style = _STYLES[series.style if series.style != "solid" else again]
        axes.plot(
            _numbers(series.x), _numbers(series.y), style, color=colour, marker=marker, markersize=4, label=series.name
        )
        if series.low:
            axes.fill_between(
                _numbers(series.x), _numbers(series.low), _numbers(series.high), color=colour, alpha=0.15, lw=0
            )
    if figure.y.zero and figure.y.scale == "linear":
        axes.set_ylim(bottom=0)
    if _is_scatter(figure):
        _name_points(axes, figure)
    _label(axes, figure)


def _name_points(axes: Axes, figure: Figure) -> None:
    """Each name on the first side of its point where it covers no other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.transforms import Bbox

    canvas = axes.get_figure()
    assert canvas is not None
    axes.autoscale_view()
    renderer = FigureCanvasAgg(canvas).get_renderer()  # type: ignore[arg-type,no-untyped-call]
    places = [axes.transData.transform((one.x[0], one.y[0] or 0.0)) for one in figure.series]
    taken: list[Any] = [Bbox.from_bounds(x - 3, y - 3, 6, 6) for x, y in places]
    for series in sorted(figure.series, key=lambda one: one.y[0] or 0.0):
        for dx, dy, side in _SIDES:
            text = axes.annotate(
                series.name,
                (series.x[0], series.y[0] or 0.0),
                (dx, dy),
                textcoords="offset points",
                fontsize=6.5,
                ha=side,
            )
            text.set_in_layout(False)
            box = text.get_window_extent(renderer)
            if axes.bbox.x0 < box.x0 and box.x1 < axes.bbox.x1 and not any(box.overlaps(other) for other in taken):
                break
            text.remove()
        else:
            continue  # no room: the page has it as a tip
        taken.append(box)


def _bars(axes: Axes, figure: Figure, stacked: bool = False) -> None:
    """Names at the left, where long ones can be read."""
    names = list(dict.fromkeys(str(x) for series in figure.series for x in series.x))
    thick = 0.8 if stacked else 0.8 / max(len(figure.series), 1)
    before = [0.0] * len(names)
    for number, series in enumerate(figure.series):
        places = [names.index(str(x)) for x in series.x]
        lengths = _numbers(series.y)
        at = [place if stacked else place - 0.4 + thick * (number + 0.5) for place in places]
        errors = None
        if series.low and not stacked:
            ends = zip(lengths, _numbers(series.low), _numbers(series.high), strict=True)
            errors = list(zip(*((middle - low, high - middle) for middle, low, high in ends), strict=True))
        left = [before[place] for place in places] if stacked else 0.0
        axes.barh(at, lengths, thick * 0.95, left=left, color=_colour(series, number), xerr=errors, label=series.name)
        for y, high, text in zip(at, _numbers(series.high or series.y), series.text, strict=False):
            axes.annotate(text, (0.0 if high != high else high, y), (4, 0), textcoords="offset points", va="center",
                          fontsize=7)  # fmt: skip
        for place, length in zip(places, lengths, strict=True):
            before[place] += length
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_ylim(len(names) - 0.5, -0.5)
    if not any(value is not None for series in figure.series for value in series.y):
        axes.set_xlim(0, 1)
    axes.set_xlabel(figure.y.label)
    if figure.y.percent:
        axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")


def _heat(axes: Axes, figure: Figure) -> None:
    columns = list(dict.fromkeys(cell["x"] for cell in figure.cells))
    rows = list(dict.fromkeys(cell["y"] for cell in figure.cells))
    values = [[float("nan")] * len(columns) for _ in rows]
    good = [cell["value"] for cell in figure.cells if cell["value"] is not None]
    dark = min(good, default=0.0) + 0.7 * (max(good, default=0.0) - min(good, default=0.0))
    for cell in figure.cells:
        row, column = rows.index(cell["y"]), columns.index(cell["x"])
        values[row][column] = float("nan") if cell["value"] is None else cell["value"]
        failed = cell["value"] is None
        colour = "#b3261e" if failed else "white" if cell["value"] > dark else "black"
        text = f"✕ {cell['text']}" if failed else cell["text"]
        axes.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
    axes.imshow(values, cmap="Blues", origin="lower", aspect="auto", alpha=0.8)
    axes.set_xticks(range(len(columns)), [str(c) for c in columns])
    axes.set_yticks(range(len(rows)), [f"{r:g}" if isinstance(r, float) else str(r) for r in rows])
    _label(axes, figure)


def _ring(axes: Axes, figure: Figure) -> None:
    """All steps below each other: how much of each chunk's sum every rank holds."""
    ranks = len(figure.cells[0]["held"])
    for line, step in enumerate(figure.cells):
        for rank, held in enumerate(step["held"]):
            for chunk, share in enumerate(held):
                left = rank + 0.1 + chunk * 0.8 / ranks
                axes.bar(
                    left, 0.8 * share, 0.75 / ranks, bottom=-line, align="edge", color=COLOURS[chunk % len(COLOURS)]
                )
    axes.set_yticks([0.4 - line for line in range(len(figure.cells))], [str(line) for line in range(len(figure.cells))])
    axes.set_xticks([rank + 0.5 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)])
    axes.set_ylabel("step")


_KINDS: dict[str, Any] = {
    "lines": _lines,
    "bars": _bars,
    "stacks": lambda axes, figure: _bars(axes, figure, stacked=True),
    "heat": _heat,
    "ring": _ring,
}
