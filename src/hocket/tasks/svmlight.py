"""The svmlight format: `label column:value column:value ...` a line, `#` begins a comment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hocket.core.errors import UserError
from hocket.tasks import textfile

MAX_COLUMN = 2**28
"""A weight for every column up to the largest one must fit into memory."""


@dataclass(frozen=True)
class Table:
    """Sparse rows in compressed form: row i has the elements from pointers[i] to pointers[i + 1]."""

    labels: np.ndarray[Any, np.dtype[np.float32]]
    pointers: np.ndarray[Any, np.dtype[np.int64]]
    columns: np.ndarray[Any, np.dtype[np.int32]]
    values: np.ndarray[Any, np.dtype[np.float32]]

    def __len__(self) -> int:
        return len(self.labels)


def read(path: Path) -> Table:
    """The rows of a file, plain or gzipped."""
    text = textfile.read(path)
    table = parse_clean(text) or parse_lines(text, path)
    if not len(table):
        raise UserError(f"{path} has only comments; one `label column:value ...` a line is expected")
    return table


def parse_clean(text: bytes) -> Table | None:
    """A text that holds nothing but labels and pairs, at once; None if it has anything unusual."""
    begin, end, per_line = textfile.tokens(text)
    first = np.cumsum(per_line) - per_line
    colons = np.flatnonzero(np.frombuffer(text, np.uint8) == ord(":"))
    begin, end = np.delete(begin, first), np.delete(end, first)
    # Each token but the first of a line has one colon, with something on both sides.
    if len(colons) != len(begin) or np.any(colons <= begin) or np.any(colons >= end - 1):
        return None
    numbers = textfile.numbers(text.replace(b":", b" "))
    if numbers is None or len(numbers) != len(per_line) + 2 * len(colons):
        return None
    pointers = np.zeros(len(per_line) + 1, np.int64)
    np.cumsum(per_line - 1, out=pointers[1:])
    label_at = 2 * pointers[:-1] + np.arange(len(per_line))
    pairs = np.delete(numbers, label_at).reshape(-1, 2)
    columns, values = pairs.T
    if np.any(columns % 1) or np.any(columns < 0) or np.any(columns > MAX_COLUMN):
        return None
    labels = numbers[label_at].astype(np.float32)
    return Table(labels, pointers, columns.astype(np.int32), values.astype(np.float32))


def parse_lines(text: bytes, path: Path) -> Table:
    """Any text of the format, line by line; the first broken line is named."""
    labels: list[float] = []
    pointers, columns, values = [0], [], []
    for number, line in enumerate(text.split(b"\n"), start=1):
        tokens = line.partition(b"#")[0].split()
        if not tokens:
            continue
        label = textfile.number(tokens[0])
        if label is None:
            raise textfile.broken(path, number, tokens[0], "a number as the label")
        for token in tokens[1:]:
            if token.startswith(b"qid:"):
                continue
            name, _, rest = token.partition(b":")
            column, value = textfile.number(name), textfile.number(rest)
            if column is None or value is None or column < 0 or not column.is_integer():
                raise textfile.broken(path, number, token, "column:value")
            if column > MAX_COLUMN:
                raise textfile.broken(path, number, token, f"a column up to {MAX_COLUMN}")
            columns.append(int(column))
            values.append(value)
        labels.append(label)
        pointers.append(len(columns))
    return Table(
        np.array(labels, np.float32),
        np.array(pointers, np.int64),
        np.array(columns, np.int32),
        np.array(values, np.float32),
    )
