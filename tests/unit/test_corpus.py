"""Texts as numbers of their words: every word counted once, wherever the pieces that are read are cut."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.core.errors import UserError
from hocket.tasks import corpus
from hocket.tasks.corpus import Corpus

WORDS = st.text("abcd", min_size=1, max_size=5)
TEXTS = st.lists(st.lists(WORDS, max_size=6), max_size=8).map(lambda lines: "\n".join(" ".join(line) for line in lines))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that even short texts have many, and the vocabulary has to grow."""
    monkeypatch.setattr(corpus, "PIECE", 16)
    monkeypatch.setattr(corpus, "WORDS", 2)
    monkeypatch.setattr(corpus, "LETTERS", 4)


def read(content: bytes, min_count: int = 1, strict: bool = False) -> Corpus:
    with TemporaryDirectory() as folder:
        path = Path(folder, "text")
        path.write_bytes(content)
        found = corpus.read(path, min_count, strict, Path(folder, "cache"))
        return Corpus(np.array(found.ids), found.words, found.counts, found.facts)


def spelt(found: Corpus) -> list[str]:
    return [found.words[number] if number >= 0 else "\n" for number in found.ids]


def lines_of(words: list[str]) -> list[list[str]]:
    lines = " ".join(words).split("\n")
    return [line.split() for line in lines if line.split()]


@settings(max_examples=60)
@given(TEXTS, st.integers(1, 3))
def test_no_word_is_lost_wherever_pieces_are_cut(text: str, min_count: int) -> None:
    counts = Counter(text.split())
    kept = {word for word, count in counts.items() if count >= min_count}
    if not kept:
        with pytest.raises(UserError):
            read(text.encode(), min_count)
        return
    found = read(text.encode(), min_count)
    assert found.facts.raw_words == sum(counts.values()) and found.facts.types == len(counts)
    assert dict(zip(found.words, found.counts.tolist(), strict=True)) == {word: counts[word] for word in kept}
    assert list(found.counts) == sorted(found.counts, reverse=True)
    wanted = [[word for word in line.split() if word in kept] for line in text.split("\n")]
    assert lines_of(spelt(found)) == [line for line in wanted if line]


def test_line_ends_stand_between_words_alone() -> None:
    assert spelt(read(b"\n\na b\n\n\nc\n\n")) == ["a", "b", "\n", "c"]


def test_gzip_gives_the_same() -> None:
    text = b"to be or not to be\n" * 9
    plain, packed = read(text), read(gzip.compress(text))
    assert plain.words == packed.words and np.array_equal(plain.ids, packed.ids)


def test_what_was_read_is_kept_until_the_text_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text"
    path.write_text("a b a")
    first = corpus.read(path, 1, False, tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "_encode", lambda *_: pytest.fail("read again"))
        again = corpus.read(path, 1, False, tmp_path / "cache")
    assert first.words == again.words == ["a", "b"]
    path.write_text("c c c c")
    assert corpus.read(path, 1, False, tmp_path / "cache").words == ["c"]


def test_invalid_utf8_is_replaced_and_counted() -> None:
    found = read("schön \ufffd ".encode() + b"a\xff b\xc3 " + "schön".encode())
    assert found.facts.replaced == 2
    assert found.words == ["schön", "\ufffd", "a\ufffd", "b\ufffd"]


@pytest.mark.parametrize(
    ("content", "strict", "message"),
    [
        (b"", False, "has no words"),
        (b" \n\t \n", False, "has no words"),
        (b"a b c", False, "none of the 3 different words .*min_count=1"),
        (b"a a a b\xff", True, "no valid UTF-8"),
        (gzip.compress(b"a b c " * 100, mtime=0)[:-9], False, "damaged gzip"),
        (b"x" * 100, False, "is it a text"),
    ],
)
def test_bad_texts_are_refused_in_one_line(content: bytes, strict: bool, message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        read(content, min_count=3, strict=strict)
    assert "\n" not in str(refused.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="directory"):
        corpus.read(tmp_path, 1, False, tmp_path)
    with pytest.raises(UserError, match="there is no file"):
        corpus.read(tmp_path / "nothing", 1, False, tmp_path)
