"""Word vectors: the windows that are drawn, the compiled gradient against autograd's, and whole runs."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hocket
from hocket.core.errors import UserError
from hocket.core.sharing import Method, Sharing
from hocket.drivers.schedule import Schedule
from hocket.kernels.arrays import APART
from hocket.kernels.memory.vector import MappedVector
from hocket.kernels.memory.words import NEXT
from hocket.kernels.models.skipgram import SkipGramKernel
from hocket.kernels.models.windows import Text, Windows, alias_table, draw
from hocket.lab.embeddings import Embeddings
from hocket.run.loading import load_task
from hocket.run.spec import RunSpec
from hocket.run.train import prepare
from hocket.tasks.files import DataFile
from hocket.tasks.madeup import KINDS
from hocket.tasks.skipgram_model import Pieces, SkipGram, pair_loss

WORDS = 40
LR = 1e-3


def text(length: int = 120, negative: int = 5, sample: float = 0.0, piece: int = 50, window: int = 3) -> Text:
    rng = np.random.default_rng(length)
    ids = rng.integers(-1, WORDS, length).astype(np.int32)
    return Text.of(ids, np.arange(WORDS, 0, -1), window, negative, sample, piece)


def drawn(text: Text, seed: int = 1) -> list[tuple[Windows, int]]:
    state = np.array([seed], np.uint64)
    found = []
    for piece in range(text.pieces):
        windows = Windows.empty(text.piece, text.negative)
        found.append((windows, draw(text, piece, state, windows, 0)))
    return found


class TestWindows:
    @settings(max_examples=40)
    @given(st.integers(1, 300), st.integers(1, 60), st.integers(1, 6))
    def test_every_word_is_the_centre_of_one_window(self, length: int, piece: int, window: int) -> None:
        whole = text(length, piece=piece, window=window)
        words = np.concatenate([windows.words[:end] for windows, end in drawn(whole)])
        assert np.array_equal(words, whole.ids[whole.ids >= 0])

    def test_no_window_goes_beyond_its_line_or_its_width(self) -> None:
        whole = text(200, window=4)
        for piece, (windows, end) in enumerate(drawn(whole)):
            ids = whole.ids[piece * whole.piece : (piece + 1) * whole.piece]
            line = np.cumsum(ids < 0)[ids >= 0]
            for i in range(end):
                low, high = windows.low[i], windows.high[i]
                assert low <= i < high <= end and i - 4 <= low and high <= i + 5
                assert set(line[low:high]) == {line[i]}

    def test_frequent_words_are_left_out_as_often_as_word2vec_does(self) -> None:
        counts, sample = np.array([900, 100]), 0.01
        ids = np.repeat(np.arange(2, dtype=np.int32), [90_000, 10_000])
        whole = Text.of(ids, counts, 5, 1, sample, len(ids))
        windows, end = drawn(whole)[0]
        share = counts / counts.sum()
        wanted = (np.sqrt(share / sample) + 1) * sample / share
        assert np.bincount(windows.words[:end]) / [90_000, 10_000] == pytest.approx(wanted, rel=0.05)

    def test_the_alias_table_holds_the_frequencies(self) -> None:
        weights = np.array([5.0, 0.1, 3.0, 1.0, 7.0, 0.4])
        own, alias = alias_table(weights)
        kept = (own + 1.0) / 2**32
        found = kept.copy()
        np.add.at(found, alias, 1 - kept)
        assert found / len(weights) == pytest.approx(weights / weights.sum(), abs=1e-8)


def trained(kernel: SkipGramKernel, x: torch.Tensor, method: Method, lr: float, pieces: int = 1) -> torch.Tensor:
    vector = MappedVector.create(Sharing(method, kernel.dim, 1), x)
    vector.control[NEXT] = 0
    kernel.worker(0, 1).run_epoch(vector, np.arange(pieces), lr)
    after = torch.empty_like(x)
    vector.snapshot(after)
    return after


def test_no_cache_line_is_written_by_two_workers() -> None:
    kernel = SkipGramKernel(text(), 16, seed=0)
    taken: list[set[int]] = []
    crew = [kernel.worker(index, 1) for index in range(8)]
    for worker in crew:
        small = worker._work.random, worker._work.inputs, worker._work.outputs, worker._work.slopes
        lines = [(part.ctypes.data // APART, (part.ctypes.data + part.nbytes - 1) // APART) for part in small]
        assert all(part.ctypes.data % APART == 0 for part in small)
        taken.append({line for first, last in lines for line in range(first, last + 1)})
    assert len(set.union(*taken)) == sum(map(len, taken))


def test_kernels_are_compiled_alike_for_a_text_in_memory_and_for_one_in_a_file(tmp_path: Path) -> None:
    ids = np.arange(WORDS, dtype=np.int32)
    (tmp_path / "ids").write_bytes(ids.tobytes())
    texts = [Text.of(each, np.ones(WORDS), 3, 5, 0, 50) for each in (ids, np.memmap(tmp_path / "ids", np.int32, "r"))]
    assert numba.typeof(texts[0]) == numba.typeof(texts[1])
    assert ids.flags.writeable


@pytest.mark.parametrize(("dim", "negative"), [(16, 5), (10, 1), (33, 8)])
def test_a_step_is_that_of_autograd(dim: int, negative: int) -> None:
    """To the first order in the rate, as the windows of a piece see what those before them changed."""
    whole = text(negative=negative)
    kernel = SkipGramKernel(whole, dim, seed=3)
    torch.manual_seed(0)
    model = SkipGram(WORDS, dim)
    x = 0.3 * torch.randn(kernel.dim)
    with torch.no_grad():
        model.inputs.copy_(x[: WORDS * dim].view(WORDS, dim))
        model.outputs.copy_(x[WORDS * dim :].view(WORDS, dim))
    pieces = Pieces(whole, np.arange(1), seed=3)
    seed = int(kernel.worker(0, 1).kept()["random"])
    pairs, targets = pieces.drawn(torch.tensor([0]), seed)
    pair_loss(model(pairs), targets).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    step = (x - trained(kernel, x, "hogwild", LR)) / LR
    assert torch.allclose(step, gradient, atol=0.02 * float(gradient.abs().max()))


@pytest.mark.parametrize("method", ["mutex", "rwlock", "leashed"])
def test_one_worker_trains_alike_however_the_vector_is_shared(method: Method) -> None:
    whole = text(200)
    kernel = SkipGramKernel(whole, 20, seed=0)
    x = 0.3 * torch.randn(kernel.dim, generator=torch.Generator().manual_seed(1))
    alone, shared = (trained(kernel, x, each, 0.05, whole.pieces) for each in ("hogwild", method))
    assert not torch.allclose(alone, x, atol=1e-3)
    assert torch.allclose(alone, shared, atol=1e-5)


class TestRuns:
    @pytest.mark.parametrize("strategy", ["hogwild", "mutex", "rwlock", "leashed", "hogwild:every=4", "serial"])
    def test_words_of_a_kind_come_together(self, strategy: str, tmp_path: Path) -> None:
        workers = 1 if strategy == "serial" else 2
        result = hocket.fit(
            "word2vec:dim=20", strategy=strategy, workers=workers, driver="compiled", epochs=2, progress=False,
            out=tmp_path / "run",
        )  # fmt: skip
        assert result.verdict == "finished" and result.test_metric is not None and result.test_metric > 0.75
        near = {word for word, _ in Embeddings.of(tmp_path / "run").nearest("six", 8)}
        assert len(near & set(KINDS["NUMBER"].split())) >= 5

    def test_the_rate_falls_to_nothing(self) -> None:
        plan = prepare(RunSpec("word2vec:dim=4", workers=1)).plan
        x = torch.zeros(1, requires_grad=True)
        schedule = Schedule(plan, torch.optim.SGD([x], lr=plan.lr), 10)
        rates = [schedule.at(step) for step in range(1, plan.steps + 1)]
        assert rates[0] == pytest.approx(plan.lr, rel=0.01) and 0 < rates[-1] < 0.01 * plan.lr
        assert np.diff(rates) == pytest.approx(-plan.lr / plan.steps)

    def test_it_is_hogwild_unless_somebody_says_otherwise(self) -> None:
        assert prepare(RunSpec("word2vec")).plan.strategy == "hogwild"
        assert prepare(RunSpec("word2vec", strategy="mutex")).plan.strategy == "mutex"
        assert prepare(RunSpec("digits")).plan.strategy == "allreduce"

    @pytest.mark.parametrize("strategy", ["allreduce", "local-sgd"])
    def test_it_is_an_ordinary_task_too(self, strategy: str) -> None:
        result = hocket.fit(
            "word2vec:dim=8,piece=100", strategy=strategy, engine="sim", workers=2, steps=60, progress=False, lr=0.1
        )
        assert result.driver == "pytorch" and result.test_loss is not None and result.test_loss < 3.9  # 6 log 2 before

    def test_a_text_of_one_word_trains_too(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        (tmp_path / "text").write_text("hello")
        hocket.fit(
            "word2vec:dim=3,min_count=1", data=str(tmp_path / "text"), workers=1, epochs=2, progress=False,
            out=tmp_path / "run",
        )  # fmt: skip
        assert Embeddings.of(tmp_path / "run").words == ["hello"]

    def test_words_are_counted_as_they_were_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        path = tmp_path / "text"
        path.write_text("a b a b c " * 500 + "d e f")
        result = hocket.fit("word2vec:dim=4,piece=100", data=str(path), workers=1, epochs=1, progress=False)
        assert result.words_per_s is not None and result.samples_per_s is not None
        assert result.words_per_s / result.samples_per_s == pytest.approx(2503 / 25)


@pytest.mark.parametrize("by_name", [True, False])
def test_text8_is_looked_for(by_name: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"a b a b c " * 50
    known = DataFile("text8", len(content), hashlib.md5(content).hexdigest())
    monkeypatch.setattr("hocket.tasks.word2vec.TEXT8", known)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOCKET_DATA", str(tmp_path))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "text8").write_bytes(content)
    monkeypatch.chdir(tmp_path)
    task = load_task("word2vec", 0, "text8" if by_name else str(tmp_path))
    assert task.notes()[0].startswith("250 words, 3 different ones")


@pytest.mark.parametrize("options", ["dim=0", "window=0", "negative=0", "min_count=0", "sample=-1", "piece=0", "dim=x"])
def test_options_that_make_no_sense_are_refused(options: str) -> None:
    with pytest.raises(UserError, match=options.partition("=")[0]):
        hocket.fit(f"word2vec:{options}", progress=False)
