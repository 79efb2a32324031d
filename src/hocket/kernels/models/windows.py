"""What skip-gram trains on: the windows of a text, with words that are left out, and others drawn, at random.

As in word2vec (Mikolov et al. 2013): a frequent word is kept with a probability, the window of each kept word shrinks
to a random width, and negative words come with the power 3/4 of their frequency. The negatives are drawn once a window,
for all its pairs (Ji et al. 2016).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hocket.kernels.arrays import Columns, Integers
from hocket.kernels.jit import kernel

Words32 = np.ndarray[Any, np.dtype[np.uint32]]
Words64 = np.ndarray[Any, np.dtype[np.uint64]]

POWER = 0.75
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


class Text(NamedTuple):
    """A text, cut into pieces of `piece` numbers, and how windows are drawn from it.

    A word is kept if 32 random bits are at most kept_up_to[word]. Negatives come from Walker's alias table: a word j
    that all have the same chance of, or alias[j] if 32 more bits are above own_up_to[j].
    """

    ids: Columns
    """-1 is the end of a line."""
    kept_up_to: Words32
    own_up_to: Words32
    alias: Columns
    window: int
    negative: int
    piece: int

    @classmethod
    def of(cls, ids: Columns, counts: Integers, window: int, negative: int, sample: float, piece: int) -> Text:
        """`sample` is the frequency above which words are left out more and more; 0 keeps all."""
        share = counts / counts.sum()
        kept = np.minimum((np.sqrt(share / sample) + 1) * sample / share, 1) if sample else np.ones(len(counts))
        numbers = np.asarray(ids).view()
        numbers.flags.writeable = False  # as those mapped from a file are: kernels are compiled for one kind
        return cls(numbers, _bits(kept), *alias_table(counts.astype(np.float64) ** POWER), window, negative, piece)

    @property
    def pieces(self) -> int:
        return -(-len(self.ids) // self.piece)


class Windows(NamedTuple):
    """Word i of those kept has words[low[i] : high[i]] around it, itself in between, and negatives[i]."""

    words: Columns
    low: Columns
    high: Columns
    negatives: Columns

    @classmethod
    def empty(cls, capacity: int, negative: int) -> Windows:
        words, low, high = np.zeros((3, capacity), np.int32)
        return cls(words, low, high, np.zeros((capacity, negative), np.int32))


def _bits(chances: np.ndarray[Any, np.dtype[np.float64]]) -> Words32:
    return np.clip(np.ceil(chances * 2**32) - 1, 0, 2**32 - 1).astype(np.uint32)


def alias_table(weights: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[Words32, Columns]:
    """Walker's table (1977): word j takes the share own_up_to[j] of its place, alias[j] takes the rest."""
    share = weights * (len(weights) / weights.sum())
    alias = np.arange(len(weights), dtype=np.int32)
    small, large = (list(np.flatnonzero(chosen)) for chosen in (share < 1, share >= 1))
    own = share.copy()
    while small and large:
        less, more = small.pop(), large[-1]
        own[less], alias[less] = share[less], more
        share[more] -= 1 - share[less]
        if share[more] < 1:
            small.append(large.pop())
    own[large + small] = 1  # what is left is 1 but for rounding
    return _bits(own), alias


@kernel
def random_bits(state: Words64) -> np.uint64:
    """64 of them (splitmix64: Steele et al. 2014)."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@kernel
def below(bits: np.uint64, n: int) -> int:
    """A number from 0 to n - 1, from the high half of random bits."""
    return int(np.int64(((bits >> _HALF) * np.uint64(n)) >> _HALF))


@kernel
def draw(text: Text, piece: int, state: Words64, windows: Windows, first: int) -> int:
    """Draw the windows of a piece and write them from `first` on; says where they end.

    No window goes beyond its line or its piece.
    """
    words, low, high, negatives = windows
    line = n = first
    for at in range(piece * text.piece, min((piece + 1) * text.piece, text.ids.size)):
        word = text.ids[at]
        if word < 0:
            line = n
        elif random_bits(state) >> _HALF <= text.kept_up_to[word]:
            words[n], low[n] = word, line
            n += 1
    end = n
    for i in range(n - 1, first - 1, -1):
        reach = 1 + below(random_bits(state), text.window)
        high[i] = min(i + reach + 1, end)
        if low[i] == i:
            end = i
        low[i] = max(low[i], i - reach)
        for k in range(text.negative):
            bits = random_bits(state)
            word = below(bits, text.alias.size)
            negatives[i, k] = word if bits & _LOW <= text.own_up_to[word] else text.alias[word]
    return n
