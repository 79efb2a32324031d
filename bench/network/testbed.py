"""Real hosts on one machine: network namespaces with names and addresses of their own, and links of a given rate.

`with Testbed(2, "100mbit") as bed: bed.start(0, ["hostname"])`. Needs root on Linux, says so otherwise, and takes
everything down again however it ends: of one that was killed a process of its own does, which is this file as a script.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

PREFIX = "hkt"
"""Names of ours are `hkt-PID-NUMBER`, and a bridge is `hktPID`."""
NETWORK = "10.213.77"
_FOLDER = "hocket-network-"
"""Begins the names of our folders for temporary files; the rest are as those of hosts."""
_WHOLE = "32768"
"""Bytes that go through a link in one piece, where a network card would cut them into packets. Tbf lets pass no more at
once than its burst, and cuts up what is larger, which takes the cores that the hosts compute on."""
_OVER_THE_LINKS = {"GLOO_SOCKET_IFNAME": "eth0", "UCX_TLS": "tcp,self"}
"""UCX, which MPICH sends with, knows that these hosts are one machine, and would go through its memory."""


class Testbed:
    """Some hosts on one switch. Every link carries `rate` in each direction, in the words of tc: 100mbit, 1gbit."""

    def __init__(self, hosts: int, rate: str, latency_buffer: str = "50ms") -> None:
        _check()
        self._count, self._rate, self._buffer = hosts, rate, latency_buffer
        self._bridge = f"{PREFIX}{os.getpid()}"
        self.names = [f"{PREFIX}-{os.getpid()}-{n}" for n in range(hosts)]
        self.addresses = [f"{NETWORK}.{n + 1}" for n in range(hosts)]
        self._started: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Testbed:
        remove_leftovers()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda which, _: sys.exit(128 + which))
        try:
            self._folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
            self._watcher = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, start_new_session=True)
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("link", "set", self._bridge, "up")
            for number in range(self._count):
                self._make_host(number)
            self._write_launcher()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make_host(self, number: int) -> None:
        name, outside, inside = self.names[number], f"{self._bridge}x{number}", "eth0"
        _ip("netns", "add", name)
        known = zip(self.addresses, self.names, strict=True)
        names = _names_of(name)  # what `ip netns exec` puts in the place of /etc/hosts
        names.parent.mkdir(parents=True, exist_ok=True)
        names.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {other}\n" for address, other in known))
        _ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", name)
        _ip("link", "set", outside, "master", self._bridge, "gso_max_size", _WHOLE, "up")
        for words in (
            ("addr", "add", f"{self.addresses[number]}/24", "dev", inside),
            ("link", "set", inside, "gso_max_size", _WHOLE, "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("-n", name, *words)
        shape = ("root", "tbf", "rate", self._rate, "burst", "64kb", "latency", self._buffer)
        _run("tc", "qdisc", "add", "dev", outside, *shape)  # what comes to the host
        _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", inside, *shape)  # what leaves it

    def _write_launcher(self) -> None:
        """What mpiexec calls in place of ssh: HOST COMMAND."""
        lines = ["#!/bin/sh", 'while [ "${1#-}" != "$1" ]; do shift; done; host=$1; shift; case "$host" in']
        lines += [f"{address}) name={name};;" for address, name in zip(self.addresses, self.names, strict=True)]
        lines += ["*) echo no such host: $host >&2; exit 1;;", "esac"]
        lines += ['exec ip netns exec "$name" unshare --uts sh -c "hostname $name; $*"']
        self.launcher = self._folder / "enter"
        self.launcher.write_text("\n".join(lines) + "\n")
        self.launcher.chmod(self.launcher.stat().st_mode | stat.S_IXUSR)

    def start(
        self, host: int, command: Sequence[str], env: dict[str, str] | None = None, stdout: int | IO[Any] | None = None
    ) -> subprocess.Popen[str]:
        """Start a command on a host, which has a host name of its own: libraries tell hosts apart by it."""
        name = self.names[host]
        inner = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', name, *command]
        settings = os.environ | _OVER_THE_LINKS | {"HYDRA_LAUNCHER_EXEC": str(self.launcher)} | (env or {})
        process = subprocess.Popen(
            ["ip", "netns", "exec", name, *inner], env=settings, stdout=stdout, text=True, start_new_session=True
        )
        self._started.append(process)
        return process

    def sent(self) -> int:
        """Bytes that have left all hosts so far, headers included."""
        shown = [subprocess.check_output(["ip", "-n", name, "-s", "-j", "link", "show", "eth0"]) for name in self.names]
        return sum(json.loads(text)[0]["stats64"]["tx"]["bytes"] for text in shown)

    def close(self) -> None:
        """End what was started, and take the hosts down."""
        for process in self._started:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
        for process in self._started:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        for number, name in enumerate(self.names):
            _ip("link", "del", f"{self._bridge}x{number}", check=False)  # at once, as a host's own end would not be
            _take_down(name)
        _ip("link", "del", self._bridge, check=False)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._watcher.communicate()


def remove_leftovers() -> None:
    """Take down what test beds left whose processes are no more."""
    for name in re.findall(rf"^{PREFIX}-\d+-\d+", _shown("ip", "netns", "list"), re.MULTILINE):
        if _is_left(name):
            _take_down(name)
    for link in re.findall(rf"^{PREFIX}\d+", _shown("ip", "-brief", "link"), re.MULTILINE):
        if _is_left(link):
            _ip("link", "del", link, check=False)
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        if _is_left(folder.name):
            shutil.rmtree(folder, ignore_errors=True)


def _is_left(name: str) -> bool:
    """Whether the process is no more whose number comes first in a name of ours."""
    found = re.search(r"\d+", name)
    return found is None or not Path(f"/proc/{found[0]}").exists()


def _names_of(name: str) -> Path:
    return Path("/etc/netns") / name / "hosts"


def _take_down(name: str) -> None:
    for pid in _shown("ip", "netns", "pids", name).split():  # ours, since the host is
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _ip("netns", "del", name, check=False)
    shutil.rmtree(_names_of(name).parent, ignore_errors=True)


def _check() -> None:
    if not sys.platform.startswith("linux"):
        sys.exit("the network test bed needs Linux: it makes hosts out of network namespaces")
    if os.geteuid():
        sys.exit("the network test bed needs root, to make network namespaces; run it with sudo")
    missing = [tool for tool in ("ip", "tc", "unshare", "hostname") if shutil.which(tool) is None]
    if missing:
        sys.exit(f"the network test bed needs {', '.join(missing)}; install iproute2, util-linux and hostname")


def _ip(*words: str, check: bool = True) -> None:
    _run("ip", *words, check=check)


def _shown(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


def _run(*words: str, check: bool = True) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr.strip().partition(chr(10))[0]}")


if __name__ == "__main__":
    sys.stdin.read()  # until the process that started us is no more
    remove_leftovers()
