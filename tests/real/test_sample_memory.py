"""What samples cost a host with many ranks: as much as one rank's, since all map what was decoded once."""

from __future__ import annotations

import os
import re
from pathlib import Path

import commands
import pytest
from covering import first

RANKS = 4
SAMPLES = 70_000 * (28 * 28 * 4 + 8)
"""Bytes of all images and labels, decoded."""

needs_mnist = pytest.mark.skipif(
    not Path(os.environ.get("HOCKET_DATA", ""), "mnist").is_dir(), reason="needs MNIST in HOCKET_DATA"
)


def resident(command: commands.Command, kind: str, where: str = "") -> int:
    """Bytes of all its processes' mappings of files in `where`, of a kind of /proc/PID/smaps."""
    total = 0
    for pid in command.pids():
        counts = False
        for line in commands.read_if_there(f"/proc/{pid}/smaps").splitlines():
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                counts = where in line
            elif counts and line.startswith(f"{kind}:"):
                total += int(line.split()[1]) * 1024
    return total


@needs_mnist
@pytest.mark.parametrize("engine", first(1, ["mpi", "torch"]))
def test_ranks_share_the_memory_of_samples(tmp_path: Path, engine: str) -> None:
    """A page that n processes map counts as an n-th in each; the samples were read whole, to check them."""
    options = ["--engine", engine, "-n", str(RANKS), "--epochs", "1000", "--out", tmp_path / "run"]
    run = commands.hocket("train", "mnist-mlp", "-s", "allreduce", *options)
    try:
        assert run.until(lambda: commands.points(tmp_path / "run") >= 1, limit_s=120)
        mapped, changed = resident(run, "Pss", "/decoded/"), resident(run, "Private_Dirty", "/decoded/")
    finally:
        run.kill()
    assert 0.9 * SAMPLES < mapped < 1.3 * SAMPLES
    assert changed == 0


ROWS, IN_A_ROW = 20_000, 30
SPARSE_SAMPLES = ROWS * (4 + 8 + IN_A_ROW * (4 + 4))
"""Bytes of labels and pointers, columns and values."""


@pytest.mark.parametrize("engine", first(1, ["mpi", "torch"]))
def test_a_command_and_its_ranks_share_the_rows_of_a_file(tmp_path: Path, engine: str) -> None:
    """All of them have mapped one memory, which the first of them has filled."""
    elements = " ".join(f"{column}:0.5" for column in range(IN_A_ROW))
    (tmp_path / "rows").write_text("".join(f"{sign} {elements}\n" for sign in (-1, 1) for _ in range(ROWS // 2)))
    options = ["--data", tmp_path / "rows", "--engine", engine, "-n", str(RANKS), "--out", tmp_path / "run"]
    run = commands.hocket("train", "svm", "-s", "allreduce", "--epochs", "1000", *options)
    try:
        assert run.until(lambda: commands.points(tmp_path / "run") >= 1, limit_s=120)
        found = re.findall(r"(\d+) +/memfd:hocket-samples", run.maps())
        mapped = resident(run, "Pss", "/memfd:hocket-samples")
    finally:
        run.kill()
    assert len(found) == RANKS + 1 and len(set(found)) == 1
    assert 0.9 * SPARSE_SAMPLES < mapped < 1.3 * SPARSE_SAMPLES
