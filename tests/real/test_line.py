"""The control line, and strangers who knock."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hocket.core.status import Status
from hocket.engines import line
from hocket.engines.line import Control, Link

GARBAGE = [
    b"",
    b"\n",
    b"\0" * 100 + b"\n",
    b"\xff\xfe\xfd\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"null\n",
    b"[]\n",
    b"7\n",
    b'"x"\n',
    b"{}\n",
    b"[" * 60_000 + b"\n",
    b'{"data": []}\n',
    b'{"data": "x"}\n',
    b'{"data": {}}\n',
    b'{"data": {"token": "\xc3\xa9"}}\n',
    b'{"data": {"token": null, "rank": 0}}\n',
    b'{"kind": "hello", "blob": 9999999999, "data": {"token": "x", "rank": 0}}\n',
    b'{"data": {"token": ' + b"9" * 50_000 + b"}}\n",
]


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> Iterator[Control]:
    broke: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", broke.append)
    control = Control()
    yield control
    control.close()
    time.sleep(0.05)
    assert not broke


def knock(control: Control) -> socket.socket:
    host, port, _ = control.address.split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def hung_up(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("said", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_hung_up_on_without_a_word(control: Control, said: bytes) -> None:
    with knock(control) as stranger:
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        assert hung_up(stranger)
    assert control.words.empty()


def test_the_token_must_be_right(control: Control) -> None:
    with knock(control) as stranger:
        data = {"token": "0" * 32, "rank": 0, "pid": 1, "host": "x"}
        stranger.sendall(json.dumps({"kind": "hello", "data": data, "blob": 0}).encode() + b"\n")
        assert hung_up(stranger)
    assert control.words.empty()


def test_a_line_without_end_is_cut(control: Control) -> None:
    with knock(control) as stranger:
        sent = 0
        with pytest.raises(OSError):
            while sent < 64 * 2**20:
                sent += stranger.send(b"x" * 65536)
        assert sent < 16 * 2**20  # no more than sockets hold


def test_the_silent_are_hung_up_on(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "HELLO_S", 0.2)
    with knock(control) as stranger:
        began = time.monotonic()
        assert hung_up(stranger)
        assert time.monotonic() - began < 5


def test_a_crowd_of_the_silent_keeps_no_rank_out(control: Control) -> None:
    crowd = [knock(control) for _ in range(300)]
    link = Link(control.address, 3, Status())
    hello = control.words.get(timeout=30)
    assert (hello.rank, hello.kind) == (3, "hello")
    assert "token" not in hello.data
    assert hung_up(crowd[0])
    assert len(control._strangers) <= line.STRANGERS
    link.tell("still here", {})
    assert control.words.get(timeout=30).kind == "still here"
    link.close()
    for stranger in crowd:
        stranger.close()


def test_words_go_both_ways(control: Control) -> None:
    heard, lost = [], threading.Event()
    link = Link(control.address, 0, Status(step=7))
    link.start(on_lost=lost.set, hear=lambda kind, data: heard.append((kind, data)))
    assert control.words.get(timeout=30).kind == "hello"
    assert control.words.get(timeout=30).data["step"] == 7
    control.tell(0, "brake", {})
    control.tell(0, "stop", {"step": 9})
    control.tell(1, "nobody hears this", {})
    limit = time.monotonic() + 30
    while len(heard) < 2 and time.monotonic() < limit:
        time.sleep(0.01)
    assert heard == [("brake", {}), ("stop", {"step": 9})]
    assert not lost.is_set()
    control.close()
    assert lost.wait(30)


FORKS = """
import os, sys, time
from hocket.core.status import Status
from hocket.engines.line import Link
link = Link(sys.argv[1], 0, Status())
link.start(on_lost=lambda: None, hear=lambda kind, data: None)
time.sleep(0.3)
if os.fork():
    os.kill(os.getpid(), 9)
print(os.getpid(), flush=True)
time.sleep(100)
"""


def test_a_child_of_a_dead_rank_does_not_hold_the_line(control: Control) -> None:
    rank = subprocess.Popen([sys.executable, "-c", FORKS, control.address], stdout=subprocess.PIPE)
    assert rank.stdout is not None
    child = int(rank.stdout.readline())
    try:
        kinds = []
        while "lost" not in kinds:
            kinds.append(control.words.get(timeout=30).kind)
        os.kill(child, 0)  # it lives
    finally:
        os.kill(child, 9)
        rank.wait()
