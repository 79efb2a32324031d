"""Word vectors from a text, by skip-gram with negative sampling."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from torch import Tensor

from hocket.core.errors import UserError
from hocket.tasks import corpus, wordfiles
from hocket.tasks.base import Task, task
from hocket.tasks.corpus import Corpus
from hocket.tasks.files import DataFile, cache, find
from hocket.tasks.footprint import check_fits
from hocket.tasks.madeup import made_up_text
from hocket.tasks.skipgram_model import Pieces, SkipGram, auc, pair_loss

JUDGED = 8
"""Pieces of the text that the learning curve is about. They are trained on too: nothing of a text is held out."""
TEXT8 = DataFile("text8", 100_000_000, "3bea1919949baf155f99411df5fada7e", zipped_as="text8.zip")
MIRRORS = ("http://mattmahoney.net/dc/",)
COPIES = 4
"""Of each parameter, at least: the model, the vector that workers share, and two while they are saved."""


@dataclass(frozen=True)
class Text:
    """The corpus as a task sees it: what is trained on, and what is said of it."""

    corpus: Corpus
    train: Pieces
    test: Pieces


class WordTask(Task):
    """A task whose samples are pieces of a text, and whose result is a vector for each word."""

    glance: ClassVar[int] = JUDGED
    rehearsed: ClassVar[bool] = False

    def text(self) -> Text:
        raise NotImplementedError

    def words_a_sample(self) -> float:
        text = self.text()
        return text.corpus.facts.raw_words / len(text.train)

    def notes(self) -> list[str]:
        found, trained = self.text().corpus, int(self.text().corpus.counts.sum())
        lines = [
            f"{found.facts.raw_words:,} words, {found.facts.types:,} different ones; {len(found.words):,} of them are "
            f"frequent enough, which makes {trained:,} words to train on"
        ]
        if found.facts.replaced:
            lines.append(f"{found.facts.replaced:,} pieces of invalid UTF-8 were replaced by U+FFFD")
        if found.made_up:
            lines.insert(0, "no --data: training on a made-up text; name your own with --data FILE")
        return lines

    def write(self, folder: Path, state: dict[str, Tensor]) -> None:
        found = self.text().corpus
        wordfiles.write(folder, found.words, state["inputs"].numpy())


@task("word2vec")
@dataclass(frozen=True)
class Word2Vec:
    """Word vectors by skip-gram with negative sampling: a text (--data FILE or text8), or a made-up one."""

    name: ClassVar[str]
    dim: int = 100
    """Length of the vectors."""
    window: int = 5
    """Words on each side of a word that it is learnt from, at most."""
    negative: int = 5
    """Words drawn at random that each word is told from."""
    sample: float = 1e-3
    """Frequency above which words are left out more and more; 0 keeps all."""
    min_count: int = 5
    """Words that are there less often have no vector."""
    piece: int = 1000
    """Words that are one sample; no window goes beyond them."""
    strict: bool = False
    """Refuse a text that is no valid UTF-8, in place of replacing what is wrong with it."""

    def __post_init__(self) -> None:
        for name in ("dim", "window", "negative", "min_count", "piece"):
            if not 1 <= getattr(self, name) < 2**31:
                raise UserError(f"task word2vec: {name} must be 1 or more; got {getattr(self, name)}")
        if self.window > 1000:
            raise UserError(f"task word2vec: window must be at most 1000; got {self.window}")
        if not (math.isfinite(self.sample) and self.sample >= 0):
            raise UserError(f"task word2vec: sample must be 0 or more; got {self.sample}")

    def make(self, seed: int, data: Path | None) -> Task:
        text = functools.cache(functools.partial(self._load, seed, data))

        class Made(WordTask):
            def text(self) -> Text:
                return text()

        def model() -> SkipGram:
            words = len(text().corpus.words)
            needed = f"task word2vec: vectors of length {self.dim} for {words} words"
            check_fits(COPIES * 4 * 2 * words * self.dim, needed, "choose a smaller dim, or a higher min_count")
            return SkipGram(words, self.dim)

        return Made(
            model,
            lambda: (text().train, text().test),
            loss=pair_loss,
            metric=auc,
            metric_name="auc",
            epochs=5,
            batch=1,
            lr=0.025,
            lr_falls=True,
            strategy="hogwild",
        )

    def _load(self, seed: int, data: Path | None) -> Text:
        from hocket.kernels.models import windows  # Numba takes half a second to import

        if data is None:
            found = made_up_text(seed)
        else:
            found = corpus.read(_named(data), self.min_count, self.strict, cache() / "corpora")
        drawn = windows.Text.of(found.ids, found.counts, self.window, self.negative, self.sample, self.piece)
        every = np.arange(drawn.pieces)
        judged = np.unique(np.linspace(0, drawn.pieces - 1, JUDGED).astype(np.int64))
        return Text(found, Pieces(drawn, every, seed), Pieces(drawn, judged, seed, fixed=True))


def _named(data: Path) -> Path:
    """The file that --data names; of a directory, and by its name where no file has that, text8."""
    by_name = data == Path(TEXT8.name) and not data.exists()
    if not (by_name or data.is_dir()):
        return data
    (path,) = find([TEXT8], "text", MIRRORS, None if by_name else data)
    return path
