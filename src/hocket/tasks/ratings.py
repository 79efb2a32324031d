"""Files of ratings: `user item rating` a line, parted by blanks, tabs, commas or `::`; further fields are ignored."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hocket.tasks import textfile

PARTING = re.compile(rb"[\s,]+|::")


@dataclass(frozen=True)
class Ratings:
    """Who rated what, by the numbers that the file has for them."""

    users: np.ndarray[Any, np.dtype[np.int64]]
    items: np.ndarray[Any, np.dtype[np.int64]]
    ratings: np.ndarray[Any, np.dtype[np.float32]]

    def __len__(self) -> int:
        return len(self.ratings)


def read(path: Path) -> Ratings:
    """The ratings of a file, plain or gzipped; a first line with names of columns is left out."""
    text = textfile.read(path)
    head, _, rest = text.partition(b"\n")
    first_line = 1
    if rest.strip() and not re.search(rb"\d", head):
        text, first_line = rest, 2
    return parse_clean(text) or parse_lines(text, path, first_line)


def parse_clean(text: bytes) -> Ratings | None:
    """A text with the same number of fields on every line, at once; None if it has anything unusual."""
    text = text.replace(b"::", b" ").replace(b",", b" ")
    _, _, per_line = textfile.tokens(text)
    fields = int(per_line[0])
    if fields < 3 or np.any(per_line != fields):
        return None
    numbers = textfile.numbers(text)
    if numbers is None or len(numbers) != fields * len(per_line):
        return None
    users, items, ratings = numbers.reshape(-1, fields)[:, :3].T
    if np.any(users % 1) or np.any(items % 1) or np.any(np.abs(users) > 2**53) or np.any(np.abs(items) > 2**53):
        return None
    return Ratings(users.astype(np.int64), items.astype(np.int64), ratings.astype(np.float32))


def parse_lines(text: bytes, path: Path, first_line: int = 1) -> Ratings:
    """Any text of the format, line by line; the first broken line is named."""
    users, items, ratings = [], [], []
    for number, line in enumerate(text.split(b"\n"), start=first_line):
        if not line.strip():
            continue
        fields = PARTING.split(line.strip())
        user, item, rating = (textfile.number(field) for field in [*fields, b"", b"", b""][:3])
        if user is None or item is None or rating is None or not (_whole(user) and _whole(item)):
            raise textfile.broken(path, number, line, "user item rating, with whole numbers for user and item")
        users.append(int(user))
        items.append(int(item))
        ratings.append(rating)
    return Ratings(np.array(users, np.int64), np.array(items, np.int64), np.array(ratings, np.float32))


def _whole(value: float) -> bool:
    """Whether it is an integer, and one that floating point holds exactly."""
    return value.is_integer() and abs(value) <= 2**53
