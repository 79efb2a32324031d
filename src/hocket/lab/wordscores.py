"""How good word vectors are: analogies, and similarity as people see it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hocket.core.errors import UserError
from hocket.lab.embeddings import Embeddings
from hocket.tasks.files import cache

FOLDER = "word-eval"
ANALOGIES = "questions-words.txt"
SIMILARITIES = ("wordsim353.tsv", "simlex999.txt", "EN-MEN-TR-3k.txt")
AT_ONCE = 128
"""Analogies whose nearest words are looked for together."""


@dataclass(frozen=True)
class Score:
    """Of one set of questions: the share that is right, or Spearman's rank correlation with people's judgement."""

    name: str
    kind: str
    value: float | None
    """None where no question could be asked."""
    asked: int
    unknown: int
    """Questions with a word that is out of the vocabulary; they count for nothing."""


def scores(vectors: Embeddings, data: Path | None) -> list[Score]:
    """All that can be had from the files that are there."""
    if data is not None and not data.expanduser().is_dir():
        raise UserError(f"--data {data}: there is no such directory; name the one that has {FOLDER}/")
    found = [(name, path) for name in (ANALOGIES, *SIMILARITIES) if (path := _find(name, data))]
    if not found:
        looked = ", ".join(str(place) for place in _places(data))
        raise UserError(f"no {ANALOGIES} and no {SIMILARITIES[0]} in {looked}; put them there, or pass --data DIR")
    return [similarity(vectors, path) if name in SIMILARITIES else analogies(vectors, path) for name, path in found]


def _places(data: Path | None) -> list[Path]:
    roots = [data, os.environ.get("HOCKET_DATA"), cache()]
    return [place for root in roots if root for place in (Path(root).expanduser() / FOLDER, Path(root).expanduser())]


def _find(name: str, data: Path | None) -> Path | None:
    return next((place / name for place in _places(data) if (place / name).is_file()), None)


def _rows(path: Path, fields: int) -> Iterator[list[str]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith(("#", ":")):
            continue
        row = line.split()
        if len(row) != fields:
            raise UserError(f"{path} line {number}: expected {fields} fields; got {len(row)}")
        yield row


def analogies(vectors: Embeddings, path: Path) -> Score:
    """Whether the nearest word to b - a + c is d, for each line `a b c d`; a, b and c are no answers."""
    rows = [[vectors.number(word) for word in row] for row in _rows(path, 4)]
    known = np.array([row for row in rows if None not in row], np.int64).reshape(-1, 4)
    right = 0
    for first in range(0, len(known), AT_ONCE):
        part = known[first : first + AT_ONCE]
        cosines = vectors.differences(part[:, :3]) @ vectors.vectors.T
        for column in part[:, :3].T:
            cosines[np.arange(len(part)), column] = -np.inf
        right += int((cosines.argmax(1) == part[:, 3]).sum())
    return Score(path.name, "right", right / len(known) if len(known) else None, len(known), len(rows) - len(known))


def similarity(vectors: Embeddings, path: Path) -> Score:
    """How well the cosines rank the pairs of the lines `a b number`."""
    from scipy.stats import spearmanr  # type: ignore[import-untyped]

    rows = list(_rows(path, 3))
    pairs = [(vectors.number(a), vectors.number(b)) for a, b, _ in rows]
    known = [k for k, pair in enumerate(pairs) if None not in pair]
    value = None
    if len(known) > 1:
        ours = [float(vectors.vectors[pairs[k][0]] @ vectors.vectors[pairs[k][1]]) for k in known]
        value = float(spearmanr(ours, _judged([rows[k] for k in known], path)).statistic)
    return Score(path.name, "Spearman", value, len(known), len(rows) - len(known))


def _judged(rows: Sequence[list[str]], path: Path) -> list[float]:
    try:
        return [float(number) for _, _, number in rows]
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
