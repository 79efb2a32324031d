"""Trained word vectors: which are near each other, and which differ in the same way."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hocket.core.errors import UserError, shown
from hocket.measure.folder import VECTORS
from hocket.tasks import wordfiles
from hocket.tasks.wordfiles import Matrix


class Embeddings:
    """Words, the most frequent first, and their vectors at length 1."""

    def __init__(self, words: Sequence[str], vectors: Matrix) -> None:
        self.words = list(words)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        self.vectors: Matrix = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
        self._number = {word: number for number, word in enumerate(self.words)}

    @classmethod
    def of(cls, run: Path) -> Embeddings:
        """Those that a run has left."""
        if not run.is_dir():
            raise UserError(f"there is no run {run}; name the folder that 'hocket train word2vec' wrote")
        words, vectors = wordfiles.read(run / VECTORS / wordfiles.TENSORS)
        with np.errstate(over="ignore"):
            if not np.isfinite(np.linalg.norm(vectors)):
                raise UserError(f"the vectors of {run} are beyond all numbers: it diverged; train with a lower --lr")
        return cls(words, vectors)

    def number(self, word: str) -> int | None:
        """Of a word as it is, or else in small letters, as most texts are cleaned."""
        found = self._number.get(word)
        return self._number.get(word.lower()) if found is None else found

    def find(self, word: str) -> int:
        found = self.number(word)
        if found is None:
            near = difflib.get_close_matches(word.lower(), self.words, n=3, cutoff=0.6)
            hint = f"did you mean {' or '.join(near)}?" if near else "no word is spelt like it"
            raise UserError(f"the word {shown(word)} is not in the vocabulary; {hint}")
        return found

    def nearest(self, word: str, count: int) -> list[tuple[str, float]]:
        """The words whose vectors point most in the direction of this word's, with the cosines."""
        number = self.find(word)
        return self._best(self.vectors[number], [number], count)

    def analogy(self, a: str, b: str, c: str, count: int) -> list[tuple[str, float]]:
        """What is to c as b is to a: nearest to b - a + c (Mikolov et al. 2013)."""
        known = [self.find(word) for word in (a, b, c)]
        return self._best(self.differences(np.array([known]))[0], known, count)

    def differences(self, triples: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> Matrix:
        """b - a + c of each (a, b, c), at length 1."""
        a, b, c = (self.vectors[column] for column in triples.T)
        wanted = b - a + c
        found: Matrix = wanted / np.maximum(np.linalg.norm(wanted, axis=1, keepdims=True), np.finfo(np.float32).tiny)
        return found

    def _best(self, direction: Matrix, without: list[int], count: int) -> list[tuple[str, float]]:
        cosines = self.vectors @ direction
        cosines[without] = -np.inf
        count = min(count, len(cosines) - len(set(without)))
        best = np.argsort(-cosines, kind="stable")[:count]
        return [(self.words[number], float(cosines[number])) for number in best]
