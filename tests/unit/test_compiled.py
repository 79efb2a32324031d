"""Compiled kernels are cached, and compiled again when any of them changes."""

from __future__ import annotations

from pathlib import Path

import numba
import pytest

from hocket.kernels import jit as compiled


def test_a_change_in_any_kernel_leads_to_a_new_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiled, "_FOLDER", tmp_path)
    (tmp_path / "caller.py").write_text("callee()")
    (tmp_path / "callee.py").write_text("1")
    before = compiled._cache_folder()
    assert compiled._cache_folder() == before
    (tmp_path / "callee.py").write_text("2")
    assert compiled._cache_folder() != before


def test_kernels_are_cached_there_and_the_users_own_folder_stays() -> None:
    users_folder = numba.config.CACHE_DIR
    plus_one = compiled.kernel(lambda x: x + 1)
    assert plus_one(1) == 2
    assert compiled._CACHE_FOLDER in str(plus_one.stats.cache_path)
    assert users_folder == numba.config.CACHE_DIR
