"""The line between the process that starts a run and its ranks: JSON lines over a socket, never pickle.

Every rank holds one connection open for as long as it lives, so a rank that dies is noticed and
named at once, whatever started it; and a rank whose starter dies ends itself.
"""

from __future__ import annotations

import hmac
import json
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

from hocket.core.status import Status

STATUS_S = 0.2
"""How often a rank says what it is doing."""
HELLO_S = 10.0
"""How long a connection may take to say who it is."""
HELLO_BYTES = 64 * 1024
STRANGERS = 64
"""How many connections may be open that have not said who they are."""
LINE_BYTES = 256 * 1024 * 1024
"""How long a rank's word may be, its blob not counted."""


@dataclass(frozen=True)
class Word:
    """Something a rank said. The kind `lost` stands for a connection that ended."""

    rank: int
    kind: str
    data: dict[str, Any]
    blob: bytes = b""


class Control:
    """The starter's end: accepts the ranks and puts what they say into `words`. Anybody may knock, so until
    a connection has shown the token it is believed nothing, given little, and cut when there are too many."""

    def __init__(self, bind: str = "127.0.0.1", advertise: str = "127.0.0.1") -> None:
        self._server = socket.create_server((bind, 0), backlog=1024)
        self._token = secrets.token_hex(16)
        self.address = f"{advertise}:{self._server.getsockname()[1]}:{self._token}"
        self.words: queue.Queue[Word] = queue.Queue()
        self._lock = threading.Lock()
        self._strangers: list[socket.socket] = []
        self._ranks: dict[int, socket.socket] = {}
        self._closed = False
        threading.Thread(target=self._accept, name="control", daemon=True).start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            everyone = [self._server, *self._strangers, *self._ranks.values()]
        for connection in everyone:
            _hang_up(connection)

    def tell(self, rank: int, kind: str, data: dict[str, Any]) -> None:
        """Say something to a rank; one that has gone does not hear it."""
        connection = self._ranks.get(rank)
        if connection is not None:
            try:
                connection.sendall(json.dumps({"kind": kind, "data": data, "blob": 0}).encode() + b"\n")
            except OSError:
                pass

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed, or out of descriptors
                self._cut(keep=len(self._strangers) - 1)
                time.sleep(0.01)
                continue
            with self._lock:
                self._strangers.append(connection)
            self._cut(keep=STRANGERS)
            threading.Thread(target=self._listen, args=(connection,), daemon=True).start()

    def _cut(self, keep: int) -> None:
        """Hang up on the strangers that have been silent longest: a rank says who it is at once."""
        with self._lock:
            cut = self._strangers[: max(len(self._strangers) - keep, 0)]
            del self._strangers[: len(cut)]
        for connection in cut:
            _hang_up(connection)

    def _listen(self, connection: socket.socket) -> None:
        rank = -1
        try:
            with connection, connection.makefile("rb") as lines:
                if (hello := self._greet(connection, lines)) is None:
                    return
                rank = hello.rank
                self.words.put(hello)
                while (word := _read(lines)) is not None:
                    self.words.put(Word(rank, *word))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            pass  # a broken connection is a lost one
        finally:
            with self._lock:
                if connection in self._strangers:
                    self._strangers.remove(connection)
            if rank >= 0:
                self.words.put(Word(rank, "lost", {}))

    def _greet(self, connection: socket.socket, lines: IO[bytes]) -> Word | None:
        """A rank's first word, or None if this is no rank of ours."""
        connection.settimeout(HELLO_S)
        data = json.loads(lines.readline(HELLO_BYTES))["data"]
        connection.settimeout(None)
        if not hmac.compare_digest(str(data.pop("token")).encode(), self._token.encode()):
            return None
        rank = int(data["rank"])
        with self._lock:
            if self._closed or connection not in self._strangers:
                return None
            self._strangers.remove(connection)
            self._ranks[rank] = connection
        return Word(rank, "hello", data)


def _hang_up(connection: socket.socket) -> None:
    """Close a connection in which another thread may be waiting."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    connection.close()


def _read(lines: IO[bytes]) -> tuple[str, dict[str, Any], bytes] | None:
    line = lines.readline(LINE_BYTES)
    if not line.endswith(b"\n"):
        return None
    head = json.loads(line)
    return head["kind"], head["data"], lines.read(head["blob"])


class Link:
    """A rank's end. `tell` may be called from any thread."""

    def __init__(self, address: str, rank: int, status: Status) -> None:
        host, port, token = address.rsplit(":", 2)
        self.status = status
        self._lock = threading.Lock()
        self._closed = False
        self._socket = socket.create_connection((host, int(port)), timeout=30)
        self._socket.settimeout(None)
        # A child that the rank forks must not hold the line open after the rank has died.
        os.register_at_fork(after_in_child=self._let_go)
        self.tell("hello", {"token": token, "rank": rank, "pid": os.getpid(), "host": socket.gethostname()})

    def start(self, on_lost: Callable[[], None], hear: Callable[[str, dict[str, Any]], None]) -> None:
        """Begin to report the status; `hear` what the starter says; call `on_lost` if it goes away."""
        threading.Thread(target=self._report, name="status", daemon=True).start()
        threading.Thread(target=self._watch, args=(on_lost, hear), name="watch", daemon=True).start()

    def tell(self, kind: str, data: dict[str, Any], blob: bytes = b"") -> None:
        head = json.dumps({"kind": kind, "data": data, "blob": len(blob)})
        with self._lock:
            if not self._closed:
                self._socket.sendall(head.encode() + b"\n" + blob)

    def tell_status(self) -> None:
        s = self.status.seen()
        told = {"step": s.step, "samples": s.samples, "loss": s.loss, "lr": s.lr, "operation": s.operation}
        self.tell("status", told)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            _hang_up(self._socket)

    def _let_go(self) -> None:
        self._lock = threading.Lock()  # another thread may have held it at the fork
        self._closed = True
        os.close(self._socket.detach())  # `close` would wait for the file that the watch thread reads

    def _report(self) -> None:
        while not self._closed:
            try:
                self.tell_status()
            except OSError:
                return
            time.sleep(STATUS_S)

    def _watch(self, on_lost: Callable[[], None], hear: Callable[[str, dict[str, Any]], None]) -> None:
        try:
            with self._socket.makefile("rb") as lines:
                while (word := _read(lines)) is not None:
                    hear(word[0], word[1])
        except (OSError, ValueError):
            pass
        if not self._closed:
            on_lost()
