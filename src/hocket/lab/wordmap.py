"""A map of words: those that are near each other in their many dimensions are near each other in two."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np

from hocket.core.errors import UserError
from hocket.lab.embeddings import Embeddings

WIDTH, HEIGHT, MARGIN = 1200, 900, 40
FEWEST = 3
NEIGHBOURS = 15


def word_map(vectors: Embeddings, count: int) -> str:
    """The most frequent words as an SVG, placed by t-SNE (van der Maaten and Hinton 2008)."""
    count = min(count, len(vectors.words))
    if count < FEWEST:
        raise UserError(f"a map needs {FEWEST} words or more, got {count}")
    from sklearn.manifold import TSNE  # type: ignore[import-untyped]

    near = min(NEIGHBOURS, (count - 1) / 3)
    places = TSNE(metric="cosine", init="random", perplexity=near, random_state=0).fit_transform(
        vectors.vectors[:count]
    )
    return _svg(vectors.words[:count], _scaled(places))


def _scaled(places: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    low, high = places.min(0), places.max(0)
    room = np.array([WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN])
    scaled: np.ndarray[Any, Any] = MARGIN + (places - low) / np.maximum(high - low, 1e-9) * room
    return scaled


def _svg(words: list[str], places: np.ndarray[Any, Any]) -> str:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="11" text-anchor="middle">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    lines += [
        f'<text x="{x:.1f}" y="{y:.1f}">{escape(word)}</text>' for word, (x, y) in zip(words, places, strict=True)
    ]
    return "\n".join([*lines, "</svg>", ""])
