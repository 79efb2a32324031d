"""The tasks that ship with Hocket, and the finding of their data."""

from __future__ import annotations

import functools
import hashlib
import http.server
import os
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from hocket.core.errors import UserError
from hocket.tasks import Task, accuracy, digits, files, mnist, task
from hocket.tasks.files import DataFile

CONTENT = {"one.gz": b"first file" * 100, "two.gz": b"second file" * 100}
FILES = [DataFile(n, len(c), hashlib.md5(c, usedforsecurity=False).hexdigest()) for n, c in CONTENT.items()]
NOWHERE = "http://127.0.0.1:9/"  # the discard port: nothing listens


@pytest.fixture
def mnist_data() -> Path:
    """The real files, from $HOCKET_DATA or from beside the repository."""
    beside = Path(__file__).parents[2].parent / "shared" / "data"
    place = Path(os.environ.get("HOCKET_DATA") or beside)
    missing = [f.name for f in mnist.FILES if not (place / "mnist" / f.name).is_file()]
    if missing:
        pytest.skip(f"no {', '.join(missing)} in {place / 'mnist'}; set HOCKET_DATA")
    return place


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no other place where files could be found."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HOCKET_DATA", raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache" / "hocket"


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A web server on this machine: the folder it serves and its address."""
    folder = tmp_path / "mirror"
    put(folder)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


def put(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in CONTENT.items():
        (folder / name).write_bytes(content)
    return folder


def refusal(mirrors: list[str], data: Path | None) -> str:
    with pytest.raises(UserError) as caught:
        files.find(FILES, "toy", mirrors, data)
    message = str(caught.value)
    assert "\n" not in message
    return message


def cached(cache: Path) -> list[str]:
    return sorted(p.name for p in (cache / "toy").iterdir())


def train(made: Task, seed: int) -> float:
    """The metric after plain serial training with the task's own settings."""
    train_set, test_set = made.load()
    model = made.build_model(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=made.lr, momentum=made.momentum)
    rng = torch.Generator().manual_seed(seed)
    for _ in range(made.epochs):
        for index in torch.randperm(len(train_set), generator=rng).split(made.batch):
            inputs, targets = train_set.take(index)
            optimizer.zero_grad()
            made.loss(model(inputs), targets).backward()
            optimizer.step()
    inputs, targets = test_set.take(torch.arange(len(test_set)))
    with torch.no_grad():
        return float(made.metric(model(inputs), targets))


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class TestBlobs:
    @staticmethod
    def tensors(seed: int) -> list[torch.Tensor]:
        made = task.make("blobs").make(seed, None)
        samples = [t for part in made.load() for t in part.take(torch.arange(len(part)))]
        return samples + list(made.build_model(seed).parameters())

    def test_shapes(self) -> None:
        x, y, x_test, y_test = self.tensors(0)[:4]
        assert x.shape == (32_000, 2) and x_test.shape == (8_000, 2)
        assert x.dtype == torch.float32 and y.dtype == torch.int64
        assert y.unique().tolist() == y_test.unique().tolist() == [0, 1, 2, 3]

    def test_the_seed_decides_everything(self) -> None:
        state = torch.get_rng_state()
        assert same(self.tensors(3), self.tensors(3))
        assert not any(torch.equal(a, b) for a, b in zip(self.tensors(3), self.tensors(4), strict=True))
        assert torch.equal(state, torch.get_rng_state()), "making a task must not touch the global generator"

    def test_a_linear_model_fails(self) -> None:
        x, y = self.tensors(0)[:2]
        x = torch.cat([x, torch.ones(len(x), 1)], dim=1)
        best = torch.linalg.lstsq(x, nn.functional.one_hot(y).float()).solution
        assert accuracy(x @ best, y) < 0.5

    @pytest.mark.parametrize("noise", ["0", "-1", "nan", "inf"])
    def test_refuses_noise(self, noise: str) -> None:
        with pytest.raises(UserError, match="noise"):
            task.make(f"blobs:noise={noise}")

    def test_has_no_target_where_none_can_be_reached(self) -> None:
        assert task.make("blobs:noise=0.2").make(0, None).target == 0.91
        assert task.make("blobs:noise=0.6").make(0, None).target is None


class TestDigits:
    def test_split(self) -> None:
        train_set, test_set = task.make("digits").make(0, None).load()
        assert (len(train_set), len(test_set)) == (1437, 360)
        x, y = train_set.take(torch.arange(1437))
        x_test, _ = test_set.take(torch.arange(360))
        assert x.shape == (1437, 64) and x.dtype == torch.float32 and y.dtype == torch.int64
        assert x.min() == 0 and x.max() == 1 and y.unique().tolist() == list(range(10))
        images = {tuple(image) for image in torch.cat([x, x_test]).tolist()}
        assert len(images) == 1797, "all images differ, so none is in both parts"

    def test_matches_scikit_learn(self) -> None:
        expected = pytest.importorskip("sklearn.datasets").load_digits()
        (x, y), (x_test, y_test) = digits._digits()
        images = {tuple(row) for row in (torch.cat([x, x_test]) * 16).tolist()}
        assert images == {tuple(row) for row in expected.data.tolist()}
        assert sorted(torch.cat([y, y_test]).tolist()) == sorted(expected.target.tolist())

    def test_the_split_does_not_depend_on_the_seed(self) -> None:
        a, b = (task.make("digits").make(seed, None).load()[1].take(torch.arange(360)) for seed in (0, 1))
        assert same(list(a), list(b))

    @pytest.mark.parametrize("seed", [0, 1])
    def test_learns(self, seed: int) -> None:
        assert train(task.make("digits").make(seed, None), seed) > 0.95

    def test_does_not_import_scikit_learn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules, "sklearn", raising=False)
        task.make("digits").make(0, None).load()
        assert "sklearn" not in sys.modules

    def test_without_scikit_learn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(UserError, match="pip install scikit-learn"):
            task.make("digits").make(0, None).load()


class TestMnist:
    @pytest.mark.parametrize(("name", "count"), [("mnist-mlp", 134_794), ("mnist-cnn", 27_354)])
    def test_model(self, name: str, count: int) -> None:
        model = task.make(name).make(0, None).build_model(0)
        assert parameters(model) == count
        assert model(torch.zeros(3, 1, 28, 28)).shape == (3, 10)

    def test_data(self, mnist_data: Path) -> None:
        made = task.make("mnist-mlp").make(0, mnist_data)
        train_set, test_set = made.load()
        assert (len(train_set), len(test_set)) == (60_000, 10_000)
        x, y = train_set.take(torch.arange(60_000))
        assert x.shape == (60_000, 1, 28, 28) and x.dtype == torch.float32 and y.dtype == torch.int64
        assert abs(x.mean()) < 1e-3 and abs(x.std() - 1) < 1e-3
        assert y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]

    def test_refuses_a_truncated_file(self, mnist_data: Path, tmp_path: Path, cache: Path) -> None:
        for file in mnist.FILES:
            (tmp_path / file.name).write_bytes((mnist_data / "mnist" / file.name).read_bytes()[:1000])
        with pytest.raises(UserError, match=r"train-images.*truncated: 1000 of 9912422 bytes"):
            task.make("mnist-mlp").make(0, tmp_path).load()

    def test_says_which_files_it_needs(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mnist, "MIRRORS", [NOWHERE])
        with pytest.raises(UserError) as caught:
            task.make("mnist-cnn").make(0, None).load()
        assert all(f.name in str(caught.value) for f in mnist.FILES) and "--data" in str(caught.value)


class TestFiles:
    def test_order_of_places(self, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        places = [tmp_path / "given" / "toy", tmp_path / "given", tmp_path / "env" / "toy", cache]
        monkeypatch.setenv("HOCKET_DATA", str(tmp_path / "env"))
        (tmp_path / "given").mkdir()
        for place in reversed(places):
            put(place)
            found = files.find(FILES, "toy", [], tmp_path / "given")
            assert found == [place / "one.gz", place / "two.gz"]

    def test_given_directory_must_exist(self, tmp_path: Path, cache: Path) -> None:
        assert f"--data {tmp_path / 'none'}" in refusal([], tmp_path / "none")

    def test_refuses_bad_files(self, tmp_path: Path, cache: Path, mirror: tuple[Path, str]) -> None:
        bad = put(tmp_path / "given") / "one.gz"
        for content, fault in [
            (CONTENT["one.gz"][:10], "truncated: 10 of 1000 bytes"),
            (CONTENT["one.gz"] + b"x", "too long: 1001 bytes instead of 1000"),
            (CONTENT["one.gz"][::-1], f"wrong checksum: md5 .* instead of {FILES[0].md5}"),
        ]:
            bad.write_bytes(content)
            with pytest.raises(UserError, match=fault) as caught:
                files.find(FILES, "toy", [mirror[1]], tmp_path / "given")
            message = str(caught.value)
            assert str(bad) in message and "delete it" in message and "\n" not in message
        assert not cache.exists(), "a bad file is refused, not replaced behind the user's back"

    def test_fetches_and_caches(
        self, cache: Path, mirror: tuple[Path, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        url = mirror[1]
        found = files.find(FILES, "toy", [NOWHERE, url], None)
        assert found == [cache / "toy" / name for name in CONTENT]
        assert [p.read_bytes() for p in found] == list(CONTENT.values())
        assert cached(cache) == sorted(CONTENT)
        assert f"{url}one.gz" in capsys.readouterr().err
        assert files.find(FILES, "toy", [NOWHERE], None) == found
        assert capsys.readouterr().err == ""

    def test_a_file_may_come_in_an_archive(self, cache: Path, mirror: tuple[Path, str]) -> None:
        content = CONTENT["one.gz"]
        with zipfile.ZipFile(mirror[0] / "one.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("one", content)
        wanted = DataFile("one", len(content), hashlib.md5(content, usedforsecurity=False).hexdigest(), "one.zip")
        assert files.find([wanted], "toy", [mirror[1]], None)[0].read_bytes() == content
        (mirror[0] / "two.zip").write_bytes(b"no archive")
        with pytest.raises(UserError, match="not a zip file"):
            files.find([DataFile("two", 3, "", "two.zip")], "toy", [mirror[1]], None)

    def test_a_bad_mirror_is_passed_over(self, cache: Path, mirror: tuple[Path, str], tmp_path: Path) -> None:
        bad = put(tmp_path / "bad")
        (bad / "one.gz").write_bytes(b"<html>sign in first</html>")
        (bad / "two.gz").unlink()
        found = files.find(FILES, "toy", [f"file://{bad}/", mirror[1]], None)
        assert [p.read_bytes() for p in found] == list(CONTENT.values())

    @pytest.mark.parametrize("content", [b"short", b"long" * 1000, CONTENT["one.gz"][::-1]])
    def test_a_corrupt_mirror_leaves_nothing(self, cache: Path, mirror: tuple[Path, str], content: bytes) -> None:
        (mirror[0] / "one.gz").write_bytes(content)
        message = refusal([mirror[1]], None)
        assert mirror[1] in message and cached(cache) == []

    def test_offline(self, cache: Path, tmp_path: Path) -> None:
        message = refusal([NOWHERE], tmp_path)
        assert "one.gz, two.gz" in message and "--data DIR" in message
        assert str(tmp_path) in message and str(cache) in message and NOWHERE in message

    def test_a_cache_that_cannot_be_made(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").touch()
        monkeypatch.delenv("HOCKET_DATA", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        assert "XDG_CACHE_HOME" in refusal([NOWHERE], None)

    def test_ranks_that_fetch_at_once_fetch_once(
        self, cache: Path, mirror: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fetched: list[str] = []
        real = files._fetch

        def slow(file: DataFile, mirrors: list[str]) -> tuple[bytes | None, list[str]]:
            fetched.append(file.name)
            time.sleep(0.05)
            return real(file, mirrors)

        monkeypatch.setattr(files, "_fetch", slow)
        ranks = [threading.Thread(target=files.find, args=(FILES, "toy", [mirror[1]], None)) for _ in range(4)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert sorted(fetched) == sorted(CONTENT)


def test_tasks_are_found_by_name() -> None:
    assert {"blobs", "digits", "mnist-cnn", "mnist-mlp"} <= set(task)
