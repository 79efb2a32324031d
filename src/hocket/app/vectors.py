"""The commands about trained word vectors: `hocket nearest`, `analogy`, `evaluate`, `map`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hocket.core.errors import UserError

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run of word2vec.")]
Count = Annotated[int, typer.Option("--count", "-k", min=1, help="How many words to show.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")]


def add_to(app: typer.Typer) -> None:
    """Make these commands of `hocket`."""
    for command in (nearest, analogy, evaluate):
        app.command()(command)
    app.command(name="map")(draw_map)


def nearest(
    run: Run,
    words: Annotated[list[str], typer.Argument(metavar="WORD...", help="Words of the vocabulary.")],
    count: Count = 8,
    as_json: Json = False,
) -> None:
    """Show the words whose vectors are nearest to those of some words."""
    from hocket.lab.embeddings import Embeddings

    vectors = Embeddings.of(run)
    found = {word: vectors.nearest(word, count) for word in words}
    if as_json:
        print(json.dumps(found))
        return
    for word, others in found.items():
        print(f"{word}: {_listed(others)}")


def analogy(
    run: Run,
    a: Annotated[str, typer.Argument(metavar="A")],
    b: Annotated[str, typer.Argument(metavar="B")],
    c: Annotated[str, typer.Argument(metavar="C")],
    count: Count = 5,
    as_json: Json = False,
) -> None:
    """Show what is to C as B is to A: 'hocket analogy RUN man king woman'."""
    from hocket.lab.embeddings import Embeddings

    found = Embeddings.of(run).analogy(a, b, c, count)
    print(json.dumps(found) if as_json else f"{a} : {b} = {c} : {_listed(found)}")


def evaluate(
    run: Run,
    data: Annotated[
        Path | None, typer.Option(help="Folder that has word-eval/. [$HOCKET_DATA]", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Score word vectors by analogies and by word similarity, and say how many words were out of vocabulary."""
    from dataclasses import asdict

    from hocket.lab.embeddings import Embeddings
    from hocket.lab.wordscores import scores

    found = scores(Embeddings.of(run), data)
    if as_json:
        print(json.dumps([asdict(score) for score in found]))
        return
    for score in found:
        value = "–" if score.value is None else f"{score.value:.2%}" if score.kind == "right" else f"{score.value:.4f}"
        print(f"{score.name}: {value} {score.kind} ({score.asked:,} asked, {score.unknown:,} out of vocabulary)")


def draw_map(
    run: Run,
    count: Annotated[int, typer.Option("--count", "-k", min=3, help="How many of the most frequent words.")] = 300,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to. [RUN/vectors/map.svg]", show_default=False)
    ] = None,
) -> None:
    """Draw the most frequent words of a run as a map, on which similar words are near each other."""
    from hocket.lab.embeddings import Embeddings
    from hocket.lab.wordmap import word_map
    from hocket.measure.folder import VECTORS

    drawn = word_map(Embeddings.of(run), count)
    to = svg or run / VECTORS / "map.svg"
    try:
        to.write_text(drawn, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {to}: {error.strerror or error}") from None
    print(to)


def _listed(words: list[tuple[str, float]]) -> str:
    return ", ".join(f"{word} {cosine:.3f}" for word, cosine in words)
