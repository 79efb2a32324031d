"""Durations, rates and counts as people write them."""

from __future__ import annotations

import re

from hocket.core.errors import UserError, shown

_SECONDS = {"h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_PREFIX = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}

# So that sums and products of times and rates stay numbers.
LONGEST_S = 1e9
SLOWEST, FASTEST = 1e-3, 1e18
"""Bytes a second."""


def seconds(text: str, what: str) -> float:
    """`2ms`, `50us`, `1.5s`, `10min`, `2h`; a bare number is seconds."""
    found = _number(text, "|".join(_SECONDS), optional=True)
    if found is None:
        raise UserError(f"{what}: cannot read {shown(text)} as a time; write it like 2ms, 50us or 1.5s")
    value = found[0] * _SECONDS[found[1] or "s"]
    if value > LONGEST_S:
        raise UserError(f"{what}: {shown(text)} is too long; {LONGEST_S:g} s is the most")
    return value


def bytes_per_second(text: str, what: str) -> float:
    """`10Gbit`, `100Mbit`, `6GB`: bits or bytes a second."""
    found = _number(text, "[KMG]?(?:bit|B)")
    if found is None or not found[0]:
        raise UserError(f"{what}: cannot read {shown(text)} as a rate; write it like 10Gbit or 6GB (a second)")
    bits = found[1].endswith("bit")
    value = found[0] * _PREFIX[found[1].removesuffix("bit").removesuffix("B")] / (8 if bits else 1)
    if not SLOWEST <= value <= FASTEST:
        raise UserError(f"{what}: {shown(text)} is out of range; write a rate like 10Gbit or 6GB (a second)")
    return value


def counted(n: float, what: str) -> str:
    """`1 run`, `1,500 runs`, `2.5 epochs`."""
    return f"{f'{n:,}' if isinstance(n, int) else f'{n:g}'} {what}{'s' * (n != 1)}"


def _number(text: str, units: str, optional: bool = False) -> tuple[float, str] | None:
    """A number of 0 or more, and the unit behind it."""
    match = re.fullmatch(rf"([0-9.]+(?:e[+-]?\d+)?)\s*({units}){'?' * optional}", text.strip(), re.ASCII)
    try:
        return (float(match[1]), match[2] or "") if match else None
    except ValueError:
        return None
