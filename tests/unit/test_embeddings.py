"""Word vectors after training: their files, their neighbours and their scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hocket.app.cli import run
from hocket.core.errors import UserError
from hocket.lab.embeddings import Embeddings
from hocket.lab.wordscores import analogies, scores, similarity
from hocket.measure.folder import VECTORS
from hocket.tasks import wordfiles

WORDS = ["man", "woman", "king", "queen", "schön"]
VECTORS_OF = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 2], [1, 1, 2], [-1, 3, 0.5]], np.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's."""
    (tmp_path / VECTORS).mkdir()
    wordfiles.write(tmp_path / VECTORS, WORDS, VECTORS_OF)
    return tmp_path


def test_files_hold_what_was_written(folder: Path) -> None:
    words, vectors = wordfiles.read(folder / VECTORS / wordfiles.TENSORS)
    assert words == WORDS and np.array_equal(vectors, VECTORS_OF)
    lines = (folder / VECTORS / wordfiles.TEXT).read_text().splitlines()
    assert lines[0] == "5 3" and lines[5] == "schön -1 3 0.5"
    binary = (folder / VECTORS / wordfiles.BINARY).read_bytes()
    assert binary.startswith(b"5 3\nman " + VECTORS_OF[0].tobytes() + b"\nwoman ")


def test_who_may_read_one_of_the_files_may_read_all(folder: Path) -> None:
    assert len({path.stat().st_mode for path in (folder / VECTORS).iterdir()}) == 1


@pytest.mark.parametrize("binary", [True, False])
def test_gensim_reads_them(folder: Path, binary: bool) -> None:
    keyed = pytest.importorskip("gensim.models").KeyedVectors
    path = folder / VECTORS / (wordfiles.BINARY if binary else wordfiles.TEXT)
    found = keyed.load_word2vec_format(str(path), binary=binary)
    assert found.index_to_key == WORDS and np.array_equal(found.vectors, VECTORS_OF)


def test_neighbours_and_analogies(folder: Path) -> None:
    vectors = Embeddings.of(folder)
    assert [word for word, _ in vectors.nearest("king", 2)] == ["queen", "man"]
    assert vectors.nearest("KING", 1)[0][1] == pytest.approx(5 / np.sqrt(5 * 6))
    assert len(vectors.nearest("king", 100)) == len(WORDS) - 1
    assert vectors.analogy("man", "king", "woman", 1)[0][0] == "queen"


def test_scores_say_what_was_out_of_the_vocabulary(tmp_path: Path, folder: Path) -> None:
    vectors = Embeddings.of(folder)
    questions, pairs = tmp_path / "questions-words.txt", tmp_path / "wordsim353.tsv"
    questions.write_text(": family\nMan King Woman Queen\nman woman king queen\nman king woman schön\nman a b c\n")
    found = analogies(vectors, questions)
    assert (found.value, found.asked, found.unknown) == (pytest.approx(2 / 3), 3, 1)
    pairs.write_text("# a comment\nking\tqueen\t9\nman\twoman\t8\nschön\tking\t1\nman\tnobody\t5\n")
    assert (similarity(vectors, pairs).value, similarity(vectors, pairs).unknown) == (pytest.approx(1.0), 1)
    assert [score.name for score in scores(vectors, tmp_path)][:2] == [questions.name, pairs.name]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["nearest", "RUN", "kign"], "did you mean king"),
        (["nearest", "nowhere", "king"], "there is no run"),
        (["analogy", "RUN", "man", "king", "x"], "not in the vocabulary"),
        (["map", "RUN", "--svg", "nowhere/map.svg"], "cannot write"),
        (["evaluate", "RUN", "--data", "nowhere"], "there is no such directory"),
    ],
)
def test_mistakes_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], command: list[str], message: str
) -> None:
    assert run([str(folder) if word == "RUN" else word for word in command]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_run_of_something_else_has_no_vectors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no word vectors"):
        Embeddings.of(tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_vectors_that_diverged_are_refused(tmp_path: Path, value: float) -> None:
    (tmp_path / VECTORS).mkdir()
    wordfiles.write(tmp_path / VECTORS, WORDS, np.where(VECTORS_OF == 3, np.float32(value), VECTORS_OF))
    with pytest.raises(UserError, match="diverged"):
        Embeddings.of(tmp_path)


def test_a_map_has_every_word(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["map", str(folder), "--count", "5"]) == 0
    drawn = (folder / VECTORS / "map.svg").read_text()
    assert all(f">{word}</text>" in drawn for word in WORDS)
    assert capsys.readouterr().out.strip().endswith("map.svg")
