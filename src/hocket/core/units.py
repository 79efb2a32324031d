"""Durations and rates as people write them."""

from __future__ import annotations

import math
import re

from hocket.core.errors import UserError

_SECONDS = {"h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_LONGEST_S = 1e12  # beyond it, adding a microsecond changes nothing
_PREFIX = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}


def seconds(text: str, what: str) -> float:
    """`2ms`, `50us`, `1.5s`, `10min`, `1h`; a bare number is seconds."""
    match = re.fullmatch(r"([0-9.]+(?:e-?\d+)?)\s*(ns|us|ms|s|min|h)?", text.strip())
    try:
        if match and (found := float(match[1]) * _SECONDS[match[2] or "s"]) <= _LONGEST_S:
            return found
    except ValueError:
        pass
    raise UserError(f"{what}: cannot read {text!r} as a time; write it like 2ms, 50us or 1.5s")


def bytes_per_second(text: str, what: str) -> float:
    """`10Gbit`, `100Mbit`, `6GB`: bits or bytes a second."""
    match = re.fullmatch(r"([0-9.]+(?:e-?\d+)?)\s*([KMG]?)(bit|B)", text.strip())
    try:
        if match and 0 < float(match[1]) < math.inf:
            return float(match[1]) * _PREFIX[match[2]] / (8 if match[3] == "bit" else 1)
    except ValueError:
        pass
    raise UserError(f"{what}: cannot read {text!r} as a rate; write it like 10Gbit or 6GB (a second)")
