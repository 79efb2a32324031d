"""Samples that one process decodes, and lends to all others of the host."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hocket.core.errors import UserError
from hocket.tasks import lent as module
from hocket.tasks.lent import Array, lent

PROCESS = """
import os, sys, time
from pathlib import Path
import numpy as np
from hocket.tasks.lent import lent
file, asked, wait_s = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
def decode():
    with asked.open("a") as lines:
        lines.write(f"{os.getpid()}\\n")
    time.sleep(wait_s)
    return [np.arange(5), np.array(7.0)]
found = lent([file, None], [1], decode)
print([array.tolist() for array in found], flush=True)
sys.stdin.read()
"""


class Decoder:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> list[Array]:
        self.asked += 1
        return [np.arange(12.0, dtype=np.float32).reshape(3, 4), np.zeros(0, np.int64), np.array(3)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows"
    path.write_text("1 1:1\n")
    return path


def alike(found: list[Array]) -> bool:
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(found, Decoder()(), strict=True))


def started(file: Path, asked: Path, wait_s: float = 0.0) -> subprocess.Popen[str]:
    """A process that wants the samples, and keeps them until its input ends."""
    argv = [sys.executable, "-c", PROCESS, str(file), str(asked), str(wait_s)]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def listens(file: Path) -> bool:
    name = module._address([file], []).removeprefix("\0")
    return f"@{name}" in Path("/proc/net/unix").read_text()


def test_many_processes_that_come_at_once_decode_once(file: Path, tmp_path: Path) -> None:
    asked, processes = tmp_path / "asked", [started(file, tmp_path / "asked", wait_s=0.2) for _ in range(4)]
    try:
        assert {said(process) for process in processes} == {"[[0, 1, 2, 3, 4], 7.0]"}
        assert len(asked.read_text().splitlines()) == 1
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_who_decodes_may_be_killed(file: Path, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    first = started(file, asked, wait_s=100)
    while not asked.exists():
        time.sleep(0.01)
    second = started(file, asked)
    first.kill()
    first.communicate()
    assert said(second) == "[[0, 1, 2, 3, 4], 7.0]"
    assert asked.read_text().split() == [str(first.pid), str(second.pid)]
    second.communicate()


def test_who_decodes_for_too_long_is_not_waited_for(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, decode = tmp_path / "asked", Decoder()
    other = started(file, asked)
    said(other)
    other.send_signal(signal.SIGSTOP)
    while Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    monkeypatch.setattr(module, "LIMIT_S", 0.1)
    try:
        assert alike(lent([file, None], [1], decode)) and decode.asked == 1
    finally:
        other.kill()
        other.communicate()


def test_who_writes_changes_a_copy_of_its_own(file: Path) -> None:
    decode = Decoder()
    first, second = lent([file], [], decode), lent([file], [], decode)
    first[0][:] = -1
    assert alike(second) and alike(lent([file], [], decode))
    assert decode.asked == 1


def test_another_file_or_option_is_decoded_again(file: Path) -> None:
    decode = Decoder()
    kept = [lent([file], [1], decode), lent([file], [2], decode), lent([file, None], [1], decode)]
    file.write_text("-1 1:1\n")
    kept.append(lent([file], [1], decode))
    assert decode.asked == len(kept)


def test_samples_that_nobody_needs_are_let_go(file: Path) -> None:
    decode = Decoder()
    found = lent([file], [], decode)
    part = found[0][1:]
    del found
    assert listens(file)
    del part
    until = time.monotonic() + 60
    while listens(file) and time.monotonic() < until:
        time.sleep(0.01)
    assert not listens(file)
    lent([file], [], decode)
    assert decode.asked == 2


def test_a_file_that_is_broken_is_so_for_everybody(file: Path, tmp_path: Path) -> None:
    def refuse() -> list[Array]:
        raise UserError("line 1")

    for path in (file, file, tmp_path / "nowhere"):
        with pytest.raises(UserError, match="line 1"):
            lent([path], [], refuse)
