"""The test bed of bench/network: hosts on one machine, of which nothing is left however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

NETWORK = Path(__file__).parents[2] / "bench/network"
sys.path.insert(0, str(NETWORK))

import testbed  # noqa: E402


def can_make_hosts() -> bool:
    """Containers may let nobody make namespaces, root or not."""
    try:
        return subprocess.run(["unshare", "--net", "tc", "qdisc"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


needs_hosts = pytest.mark.skipif(os.geteuid() != 0 or not can_make_hosts(), reason="needs root and namespaces")

PROGRAM = """
import subprocess, time
from testbed import Testbed
with Testbed(2, "100mbit") as bed:
    sleepers = [bed.start(host, ["sleep", "300"]) for host in range(2)]
    print(bed.start(1, ["hostname"], stdout=subprocess.PIPE).communicate()[0], flush=True)
    time.sleep(300)
"""


def left_of(pid: int) -> str:
    """What is there of a test bed: hosts, links, files."""
    shown = [["ip", "netns", "list"], ["ip", "-brief", "link"], ["ls", "/tmp", "/etc/netns"]]
    told = "\n".join(subprocess.run(words, capture_output=True, text=True, check=False).stdout for words in shown)
    return "\n".join(line for line in told.splitlines() if str(pid) in line and ("hkt" in line or "hocket" in line))


@needs_hosts
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_test_bed(number: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=os.environ | {"PYTHONPATH": str(NETWORK)}, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        assert process.stdout and process.stdout.readline() == f"hkt-{process.pid}-1\n"
        assert left_of(process.pid)
        process.send_signal(number)
    until = time.monotonic() + 30
    while left_of(process.pid) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left_of(process.pid)


@needs_hosts
def test_a_rate_that_is_none_is_told_in_one_line() -> None:
    program = PROGRAM.replace("100mbit", "fast")
    found = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": str(NETWORK)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert found.returncode == 1 and found.stderr.count("\n") == 1
    assert 'illegal value for "rate": "fast"' in found.stderr


def test_without_root_or_tools_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patched, pytest.raises(SystemExit, match="needs root"):
        patched.setattr(os, "geteuid", lambda: 1000)
        testbed.Testbed(2, "100mbit")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(SystemExit, match="needs ip, tc, unshare, hostname; install"):
        testbed.Testbed(2, "100mbit")
