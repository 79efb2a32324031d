"""Products of cases of which a choice is enough: all of them are run with `--thorough`."""

from __future__ import annotations

from collections.abc import Collection
from itertools import product
from typing import Any

import pytest


def covering(*values: Collection[Any]) -> list[Any]:
    """Every combination of the values; marked `thorough` are all but a choice in which each value is found."""
    lists = [list(each) for each in values]
    chosen = {tuple(i % len(each) for each in lists) for i in range(max(map(len, lists)))}
    return [
        pytest.param(*(each[i] for each, i in zip(lists, at, strict=True)), marks=() if at in chosen else THOROUGH)
        for at in product(*(range(len(each)) for each in lists))
    ]


def first(count: int, values: Collection[Any]) -> list[Any]:
    """These values, or tuples of them, of which those behind the first are marked `thorough`."""
    cases = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*case, marks=() if i < count else THOROUGH) for i, case in enumerate(cases)]


THOROUGH = pytest.mark.thorough
