"""A text as numbers of its words: read once, in pieces, and kept in a file that is mapped into memory.

The text may be larger than memory: only its vocabulary, and the piece that is read just now, are there at one time.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import stat
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from hocket.core.errors import UserError, shown

if TYPE_CHECKING:
    from hocket.kernels.arrays import Columns, Integers

PIECE = 1 << 24
"""Bytes that are read at a time; a word must be shorter."""
LETTERS = 1 << 20
WORDS = 1 << 16
"""Room in the vocabulary to begin with."""
GZIP = b"\x1f\x8b"
VERSION = 1
"""Of what is kept in the cache."""


@dataclass(frozen=True)
class Facts:
    """What was found while reading."""

    raw_words: int
    """All words of the text."""
    types: int
    """Different ones."""
    replaced: int
    """Pieces of invalid UTF-8, each of which became one U+FFFD."""


@dataclass(frozen=True)
class Corpus:
    """A text as numbers; -1 stands where a line ended, if others follow. Words are numbered from the most frequent."""

    ids: Columns
    words: list[str]
    counts: Integers
    facts: Facts
    made_up: bool = False


def read(path: Path, min_count: int, strict: bool, folder: Path) -> Corpus:
    """The text of a file, plain or gzipped; its numbers are kept in `folder` for the next time."""
    state = _regular(path)
    asked = [VERSION, str(path.resolve()), state.st_size, state.st_mtime_ns, min_count, strict]
    name = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:24]
    kept, vocabulary = folder / f"{name}.ids", folder / f"{name}.npz"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not vocabulary.exists():
            _encode(path, min_count, strict, kept, vocabulary)
        return _load(kept, vocabulary)
    except OSError as error:
        raise UserError(
            f"cannot keep the words of {path} in {folder}: {error.strerror or error}; set XDG_CACHE_HOME to a "
            "directory that has room"
        ) from None


def _load(kept: Path, vocabulary: Path) -> Corpus:
    with np.load(vocabulary) as found:
        words = found["letters"].tobytes().decode().split("\n")
        facts = Facts(**json.loads(found["facts"].tobytes()))
        return Corpus(np.memmap(kept, np.int32, "r"), words, found["counts"], facts)


def _encode(path: Path, min_count: int, strict: bool, kept: Path, vocabulary: Path) -> None:
    """Write both files; who reads them sees all or nothing, as the vocabulary comes last."""
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        stream, table = Path(folder, "ids"), Path(folder, "vocabulary.npz")
        with stream.open("wb") as out:
            counted = _count(path, strict, out)
        letters, ends, counts, facts = counted
        if not facts.raw_words:
            raise UserError(f"{path} has no words; a corpus is a text with blanks between its words")
        order = np.argsort(-counts, kind="stable")
        order = order[counts[order] >= min_count]
        if not len(order):
            raise UserError(
                f"none of the {facts.types} different words of {path} is there {min_count} times, the most frequent "
                f"{int(counts.max())} times; use a lower min_count, as in word2vec:min_count={int(counts.max())}"
            )
        numbers = np.full(len(counts), -1, np.int32)
        numbers[order] = np.arange(len(order))
        _renumber(stream, numbers)
        begins = np.concatenate([[0], ends[:-1]])
        text = b"\n".join(letters[begins[w] : ends[w]].tobytes() for w in order)
        np.savez(
            table,
            letters=np.frombuffer(text, np.uint8),
            counts=counts[order],
            facts=np.frombuffer(json.dumps(asdict(facts)).encode(), np.uint8),
        )
        os.replace(stream, kept)
        os.replace(table, vocabulary)


def _count(path: Path, strict: bool, out: IO[bytes]) -> tuple[Any, Integers, Integers, Facts]:
    """Letters, ends and counts of all words, whose numbers go to `out` in their order."""
    from hocket.kernels import tokens  # Numba takes half a second to import

    table, words, replaced = tokens.Table.empty(WORDS, LETTERS), 0, 0
    for piece in _pieces(path):
        text, bad = _valid(piece, path, strict)
        replaced += bad
        letters = np.frombuffer(text, np.uint8)
        numbers = np.empty(len(letters) // 2 + len(letters) % 2 + text.count(b"\n"), np.int32)
        at, state = 0, tokens.TABLE_FULL
        while state != tokens.READ_ALL:
            state, at, words, written = tokens.count_words(letters, at, table, words, numbers)
            out.write(numbers[:written].tobytes())
            if state != tokens.READ_ALL:
                table = table.larger(words)
    counts = table.counts[:words]
    return table.letters, table.ends[:words], counts, Facts(int(counts.sum()), words, replaced)


def _pieces(path: Path) -> Iterator[bytes]:
    """The text in pieces that end with a blank."""
    rest = b""
    try:
        with path.open("rb") as raw:
            packed = raw.peek(2).startswith(GZIP)
            file: Any = gzip.GzipFile(fileobj=raw) if packed else raw
            while block := file.read(PIECE):
                text = rest + block
                cut = max(text.rfind(blank) for blank in (b" ", b"\n", b"\t", b"\r")) + 1
                if not cut and len(text) > 2 * PIECE:
                    raise UserError(f"{path} has a word of more than {PIECE >> 20} MiB; is it a text?")
                if cut:
                    yield text[:cut]
                rest = text[cut:]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is a damaged gzip file: {error}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    if rest:
        yield rest + b" "


def _valid(piece: bytes, path: Path, strict: bool) -> tuple[bytes, int]:
    """The piece as valid UTF-8, and how many places were replaced."""
    try:
        if not piece.isascii():
            piece.decode()
        return piece, 0
    except UnicodeDecodeError as error:
        if strict:
            bad = piece[error.start : error.start + 4]
            raise UserError(
                f"{path} is no valid UTF-8 (at {shown(bad)}); leave strict out to replace such bytes"
            ) from None
    known = piece.decode(errors="ignore").count("\ufffd")
    text = piece.decode(errors="replace")
    return text.encode(), text.count("\ufffd") - known


def _renumber(stream: Path, numbers: Columns) -> None:
    """Number the words of a file anew, in place, piece by piece; what is left over at its end is cut off."""
    from hocket.kernels import tokens

    ids = np.memmap(stream, np.int32, "r+")
    written = 0
    for begin in range(0, len(ids), PIECE):
        written = tokens.renumber(ids, begin, min(begin + PIECE, len(ids)), numbers, written)
    while written and ids[written - 1] == tokens.LINE_END:
        written -= 1
    ids.flush()
    os.truncate(stream, 4 * written)


def _regular(path: Path) -> os.stat_result:
    try:
        state = path.stat()
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {shown(str(path))}: {getattr(error, 'strerror', None) or error}") from None
    if stat.S_ISDIR(state.st_mode):
        raise UserError(f"{path} is a directory; name a file")
    if not stat.S_ISREG(state.st_mode):
        raise UserError(f"{path} is not a regular file; write the text into one, and name it")
    return state
