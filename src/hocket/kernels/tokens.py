"""The words of a text, numbered in the order of their first appearance: a hash table in plain arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hocket.kernels.arrays import Columns, Integers
from hocket.kernels.jit import kernel

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Hashes = np.ndarray[Any, np.dtype[np.uint64]]

LINE_END = -1
"""Stands in a stream of numbers where a line ended."""
BLANK, NEWLINE = 32, 10

READ_ALL, TABLE_FULL, LETTERS_FULL = range(3)

# FNV-1a
_BASIS, _PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)


class Table(NamedTuple):
    """Word w has letters[ends[w - 1] : ends[w]] (ends[-1] is 0), hashes[w] and counts[w].

    slots[h] is a word plus 1, or 0 where the slot is free; their number is a power of two.
    """

    slots: Columns
    hashes: Hashes
    ends: Integers
    counts: Integers
    letters: Bytes

    @classmethod
    def empty(cls, words: int, letters: int) -> Table:
        """Room for so many words and letters."""
        slots = 1 << max(2 * words - 1, 1).bit_length()
        return cls(
            np.zeros(slots, np.int32),
            np.zeros(words, np.uint64),
            np.zeros(words + 1, np.int64),
            np.zeros(words, np.int64),
            np.zeros(letters, np.uint8),
        )

    def larger(self, words: int) -> Table:
        """The same words, with room for twice as many, and for more letters."""
        new = Table.empty(2 * len(self.hashes), 2 * len(self.letters))
        for name in ("hashes", "counts", "letters"):
            old = getattr(self, name)
            getattr(new, name)[: len(old)] = old
        new.ends[:words] = self.ends[:words]
        _place(new.slots, new.hashes, words)
        return new


@kernel
def _place(slots: Columns, hashes: Hashes, words: int) -> None:
    mask = np.uint64(slots.size - 1)
    for word in range(words):
        slot = hashes[word] & mask
        while slots[slot] != 0:
            slot = (slot + np.uint64(1)) & mask
        slots[slot] = word + 1


@kernel
def _find(table: Table, words: int, text: Bytes, begin: int, end: int, code: np.uint64) -> tuple[int, np.uint64]:
    """The word text[begin:end] if it is one of the first `words`, else -1; and the slot where it is or would be."""
    slots, hashes, ends, _, letters = table
    mask = np.uint64(slots.size - 1)
    slot = code & mask
    while slots[slot] != 0:
        word = slots[slot] - 1
        if hashes[word] == code:
            first = ends[word - 1] if word else 0
            same = ends[word] - first == end - begin
            k = 0
            while same and k < end - begin:
                same = letters[first + k] == text[begin + k]
                k += 1
            if same:
                return word, slot
        slot = (slot + np.uint64(1)) & mask
    return -1, slot


@kernel
def count_words(text: Bytes, begin: int, table: Table, words: int, out: Columns) -> tuple[int, int, int, int]:
    """Number and count the words of `text` from `begin` on; blanks are all bytes up to the space.

    The text must end with a blank. Returns how it ended, where it got to, how many words the table has then, and how
    many numbers were written to `out`, which has room for one for every two letters. LINE_END stands for each newline.
    """
    slots, hashes, ends, counts, letters = table
    written = 0
    at = begin
    while at < text.size:
        letter = text[at]
        if letter <= BLANK:
            if letter == NEWLINE:
                out[written] = LINE_END
                written += 1
            at += 1
            continue
        first = at
        code = _BASIS
        while letter > BLANK:
            code = (code ^ np.uint64(letter)) * _PRIME
            at += 1
            letter = text[at]
        code ^= code >> np.uint64(32)
        word, slot = _find(table, words, text, first, at, code)
        if word < 0:
            start = ends[words - 1] if words else 0
            if words == hashes.size:
                return TABLE_FULL, first, words, written
            if start + at - first > letters.size:
                return LETTERS_FULL, first, words, written
            for k in range(at - first):
                letters[start + k] = text[first + k]
            word = words
            ends[word] = start + at - first
            hashes[word] = code
            slots[slot] = word + 1
            words += 1
        counts[word] += 1
        out[written] = word
        written += 1
    return READ_ALL, at, words, written


@kernel
def renumber(stream: Columns, begin: int, end: int, numbers: Columns, written: int) -> int:
    """Give the words of a stream from `begin` to `end` new numbers, in place, from `written` on; says how far it got.

    Words whose number is below 0 go, and so do line ends that follow another or stand at the beginning.
    """
    for at in range(begin, end):
        word = stream[at]
        number = numbers[word] if word >= 0 else -1
        if number >= 0:
            stream[written] = number
            written += 1
        elif word == LINE_END and written > 0 and stream[written - 1] != LINE_END:
            stream[written] = LINE_END
            written += 1
    return written
