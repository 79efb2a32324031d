"""Sparse rows in the form that is read fastest: in groups of columns and their values, side by side in memory.

A row of compressed sparse rows lies in two far places, of which the hardware foresees neither when rows come in random
order. Here it is one piece, of which each group is less than a cache line, and the whole table is on huge pages.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hocket.core.memory_use import in_large_pages
from hocket.kernels.arrays import Columns, Floats, Integers
from hocket.kernels.jit import kernel
from hocket.kernels.nearness import prefetch

# Without a sign, as what may be below 0 costs a test at every access
Firsts = np.ndarray[Any, np.dtype[np.uint64]]
Groups = np.ndarray[Any, np.dtype[np.void]]

GROUP = 8
"""Elements of a group."""


def pack(pointers: Integers, columns: Columns, values: Floats, features: int) -> tuple[Firsts, Groups]:
    """Row r is the groups from firsts[r] to firsts[r + 1].

    What its last group has too many are columns of the row again, with values of 0: adding a multiple of a row changes
    nothing but that row's columns.
    """
    lengths = np.diff(pointers)
    groups_of = -(-lengths // GROUP)
    firsts = np.concatenate([[0], np.cumsum(groups_of)])
    index = np.uint16 if features <= 1 << 16 else np.uint32  # less to fetch
    group = np.dtype([("columns", index, GROUP), ("values", np.float32, GROUP)])
    # With pages of 4 KiB every row would need one or two that the processor has not at hand
    groups = np.frombuffer(in_large_pages(int(firsts[-1]) * group.itemsize), group, int(firsts[-1]))

    places = groups_of * GROUP
    place = np.arange(places.sum()) - np.repeat(firsts[:-1] * GROUP, places)  # of each element in its row
    length = np.repeat(lengths, places)
    source = np.repeat(pointers[:-1], places) + place % np.maximum(length, 1)
    groups["columns"] = columns[source].reshape(-1, GROUP)
    groups["values"] = np.where(place < length, values[source], 0).reshape(-1, GROUP)
    return firsts.astype(np.uint64), groups


@kernel
def element(groups: Groups, first: int, k: int) -> tuple[int, np.float32]:
    """Column and value of element k of the row that begins at group `first`."""
    group = groups[first + np.uint64(k // GROUP)]
    return group.columns[k % GROUP], group.values[k % GROUP]


@kernel(fastmath={"contract"})
def score(x: Floats, groups: Groups, first: int, last: int, soon: int) -> np.float32:
    """The product of a row and the weights, in four sums, as one would wait for each of its additions.

    Meanwhile as many groups from `soon` on are fetched, where a row begins that will be read soon: rows come in random
    order, which no hardware foresees, and half of the time would be spent waiting for them.
    """
    a = b = c = d = np.float32(0)
    for at in range(first, last):
        prefetch(groups, soon + (at - first))
        group = groups[at]
        columns, values = group.columns, group.values
        a += x[columns[0]] * values[0]
        b += x[columns[1]] * values[1]
        c += x[columns[2]] * values[2]
        d += x[columns[3]] * values[3]
        a += x[columns[4]] * values[4]
        b += x[columns[5]] * values[5]
        c += x[columns[6]] * values[6]
        d += x[columns[7]] * values[7]
    return (a + b) + (c + d)


@kernel
def fetch_row(groups: Groups, first: int, last: int) -> None:
    """Begin to bring a row near."""
    for at in range(first, last):
        prefetch(groups, at)


@kernel(fastmath={"contract"})
def add_row(x: Floats, groups: Groups, first: int, last: int, factor: np.float32) -> None:
    """x += factor times a row."""
    for at in range(first, last):
        group = groups[at]
        columns, values = group.columns, group.values
        for j in range(GROUP):
            x[columns[j]] += factor * values[j]


@kernel(fastmath={"contract"})
def shrink_and_add_row(
    x: Floats, groups: Groups, first: int, length: int, strength: np.float32, decay: Floats, factor: np.float32
) -> None:
    """Shrink each weight of a row by strength * decay, to 0 at most, then add factor times the row."""
    full = length // GROUP
    for at in range(first, first + np.uint64(full)):
        group = groups[at]
        columns, values = group.columns, group.values
        for j in range(GROUP):
            kept = max(np.float32(0), np.float32(1) - strength * decay[columns[j]])
            x[columns[j]] = kept * x[columns[j]] + factor * values[j]
    for k in range(full * GROUP, length):
        column, value = element(groups, first, k)
        kept = max(np.float32(0), np.float32(1) - strength * decay[column])
        x[column] = kept * x[column] + factor * value
