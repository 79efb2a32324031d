"""Compiled kernels are cached where nobody else can write, and compiled again when any of them changes."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numba
import pytest
from numba.core.dispatcher import Dispatcher

import hocket.kernels
from hocket.kernels import jit


def test_a_change_in_any_kernel_leads_to_a_new_cache(tmp_path: Path) -> None:
    files = [tmp_path / "caller.py", tmp_path / "callee.py"]
    for file in files:
        file.write_text("1")
    before = jit._fingerprint(files)
    assert jit._fingerprint(files) == before
    files[1].write_text("2")
    assert jit._fingerprint(files) != before


def test_all_that_is_compiled_is_looked_at() -> None:
    """Functions and constants from outside the kernels too."""
    sources = {str(path) for path in jit._sources()}
    core = Path(hocket.kernels.__file__).parents[1] / "core"
    compiled = set()
    for module in pkgutil.walk_packages(hocket.kernels.__path__, "hocket.kernels."):
        found = importlib.import_module(module.name)
        compiled |= {v.py_func.__code__.co_filename for v in vars(found).values() if isinstance(v, Dispatcher)}
        for node in ast.walk(ast.parse(Path(str(found.__file__)).read_text())):
            from_core = isinstance(node, ast.ImportFrom) and str(node.module).startswith("hocket.core.")
            if from_core and any(name.name.isupper() for name in node.names):
                compiled.add(str(core / f"{node.module.split('.')[-1]}.py"))
    assert str(core / "staleness.py") in compiled and str(core / "sharing.py") in compiled
    assert compiled <= sources


def test_kernels_are_cached_there_and_the_users_own_folder_stays() -> None:
    users_folder = numba.config.CACHE_DIR
    plus_one = jit.kernel(lambda x: x + 1)
    assert plus_one(1) == 2
    assert jit._CACHE_FOLDER and jit._CACHE_FOLDER in str(plus_one.stats.cache_path)
    assert users_folder == numba.config.CACHE_DIR


def test_the_places_and_their_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package, temporary = jit._FOLDER / "__pycache__", Path(f"/some/tmp/hocket-kernels-{os.geteuid()}")
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/some/tmp")
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    assert list(jit._places()) == [package, Path("/home/me/.cache/hocket/kernels"), temporary]
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert list(jit._places()) == [package, Path("/elsewhere/hocket/kernels"), temporary]
    monkeypatch.setattr(numba.config, "CACHE_DIR", "/given")
    assert next(jit._places()) == Path("/given")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert list(jit._places()) == [Path("/given"), package, temporary]


@pytest.mark.parametrize("first", range(4))
def test_the_first_private_place_is_taken(first: int) -> None:
    places = [Path("/a"), Path("/b"), Path("/c")]
    asked = []

    def is_private(folder: Path) -> bool:
        asked.append(folder.parent)
        return len(asked) > first

    chosen = jit._cache_folder(places, is_private)
    assert asked == places[: first + 1]
    assert chosen == (f"{places[first]}/kernels-{jit._fingerprint(jit._sources())}" if first < 3 else "")


def open_to(mode: int) -> Callable[[Path], None]:
    return lambda folder: (folder.mkdir(), folder.chmod(mode))[1]


def test_a_new_folder_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        assert jit._is_private(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    assert [(tmp_path / p).stat().st_mode & 0o777 for p in ("a", "a/b", "a/b/c")] == [0o700] * 3
    assert jit._is_private(tmp_path / "a" / "b" / "c"), "the second time too"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o707, 0o1777])
def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path, mode: int) -> None:
    open_to(mode)(tmp_path / "open")
    assert not jit._is_private(tmp_path / "open")


def test_nor_one_that_others_can_replace(tmp_path: Path) -> None:
    open_to(0o777)(tmp_path / "open")
    assert not jit._is_private(tmp_path / "open" / "mine")
    (tmp_path / "open").chmod(0o1777)
    assert jit._is_private(tmp_path / "open" / "mine")


def test_nor_one_that_another_has_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert jit._is_private(tmp_path / "mine")
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    assert not jit._is_private(tmp_path / "mine")


def test_nor_one_elsewhere_behind_a_link_a_file_or_one_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir(0o700)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    (tmp_path / "file").touch()
    assert not jit._is_private(tmp_path / "link")
    assert not jit._is_private(tmp_path / "file")
    assert not jit._is_private(tmp_path / "file" / "below")
    assert jit._is_private(tmp_path / "mine")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert not jit._is_private(tmp_path / "mine")


def test_without_any_place_kernels_still_run() -> None:
    program = (
        "from hocket.kernels import jit\n"
        "jit._CACHE_FOLDER = ''\n"
        "plus_one = jit.kernel(lambda x: x + 1)\n"
        "print(plus_one(1), plus_one._cache.__class__.__name__)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.stdout.split() == ["2", "NullCache"], ended.stderr
