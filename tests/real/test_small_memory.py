"""Runs where /dev/shm is small, as it is in a container: 64 MB in Docker's, unless it is told otherwise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

OWN_MOUNTS = ["unshare", "--mount", "--map-root-user"]


def in_little(size: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command with a /dev/shm of its own, of so many bytes; what it leaves there is its standard output."""
    script = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && "$@" >/dev/null; status=$?; ls -A /dev/shm; exit $status'
    argv = [*OWN_MOUNTS, "sh", "-c", script, "sh", sys.executable, "-m", "hocket", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=300)


@pytest.fixture(autouse=True)
def _mounts() -> None:
    try:
        tried = subprocess.run([*OWN_MOUNTS, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if tried.returncode:
        pytest.skip("may not mount a /dev/shm of its own")


@pytest.mark.parametrize("strategy", ["allreduce", "server:mode=async"])
def test_where_nothing_fits_ranks_share_memory_that_is_in_no_folder(tmp_path: Path, strategy: str) -> None:
    words = ["-n", "2", "--engine", "torch", "-s", strategy, "--steps", "3", "--out", str(tmp_path / "run")]
    done = in_little("64k", "train", "digits", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(("size", "ranks"), [("16m", 2), ("40m", 8)])
def test_ranks_start_in_little_shared_memory(tmp_path: Path, size: str, ranks: int) -> None:
    words = ["-n", str(ranks), "--engine", "mpi", "--steps", "3", "--out", str(tmp_path / "run")]
    done = in_little(size, "train", "digits", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
