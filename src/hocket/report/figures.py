"""What a figure is, whoever draws it: the page's script or matplotlib."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["lines", "bars", "stacks", "heat", "ring"]
Scale = Literal["linear", "log"]


@dataclass(frozen=True)
class Axis:
    """What a direction means, with its unit."""

    label: str
    scale: Scale = "linear"
    zero: bool = False
    """Whether it begins at 0."""
    percent: bool = False
    values: bool = False
    """Whether the values themselves are its ticks: few that somebody chose, such as numbers of workers."""


@dataclass(frozen=True)
class Series:
    """One line, or one colour of bars. `low` and `high` are the spread around `y`, where there are several runs."""

    name: str
    x: list[Any]
    y: list[float | None]
    low: list[float | None] = field(default_factory=list)
    high: list[float | None] = field(default_factory=list)
    style: Literal["solid", "dashed", "dotted"] = "solid"
    points: bool = False
    """Whether each value is marked, as where there are few."""
    ideal: bool = False
    """A reference, not a measurement: drawn in grey."""
    text: list[str] = field(default_factory=list)
    """Of bars: what is written at each; a bar without a value has only that."""


@dataclass(frozen=True)
class Figure:
    """Data and axes, no colours: they follow from the order of the series."""

    name: str
    """Of its file, and of its place in the page."""
    title: str
    kind: Kind
    x: Axis
    y: Axis
    series: list[Series]
    says: str = ""
    """What to see in it, in a sentence."""
    command: str = ""
    """What makes the runs again that it shows."""
    cells: list[dict[str, Any]] = field(default_factory=list)
    """Of a heat map: x, y, value and what is written there; of a ring: its steps."""

    begins: list[str] = field(default_factory=list)
    """Of many series, those that are shown before the reader chooses; all, if empty."""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
