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


@dataclass(frozen=True)
class Word:
    """Something a rank said. The kind `lost` stands for a connection that ended."""

    rank: int
    kind: str
    data: dict[str, Any]
    blob: bytes = b""


class Control:
    """The starter's end: accepts the ranks and puts what they say into `words`."""

    def __init__(self, bind: str = "127.0.0.1", advertise: str = "127.0.0.1") -> None:
        self._server = socket.create_server((bind, 0), backlog=1024)
        self._token = secrets.token_hex(16)
        self.address = f"{advertise}:{self._server.getsockname()[1]}:{self._token}"
        self.words: queue.Queue[Word] = queue.Queue()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, name="control", daemon=True).start()

    def close(self) -> None:
        self._server.close()
        for connection in self._open:
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self._open.append(connection)
            threading.Thread(target=self._listen, args=(connection,), daemon=True).start()

    def _listen(self, connection: socket.socket) -> None:
        rank = -1
        try:
            with connection, connection.makefile("rb") as lines:
                hello = _read(lines)
                if hello is None or not hmac.compare_digest(str(hello[1].get("token")), self._token):
                    return
                rank = int(hello[1]["rank"])
                del hello[1]["token"]
                self.words.put(Word(rank, *hello))
                while (word := _read(lines)) is not None:
                    self.words.put(Word(rank, *word))
        except (OSError, ValueError, KeyError):
            pass  # a broken connection is a lost one
        finally:
            if rank >= 0:
                self.words.put(Word(rank, "lost", {}))


def _read(lines: IO[bytes]) -> tuple[str, dict[str, Any], bytes] | None:
    line = lines.readline()
    if not line:
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
        self.tell("hello", {"token": token, "rank": rank, "pid": os.getpid(), "host": socket.gethostname()})

    def start(self, on_lost: Callable[[], None]) -> None:
        """Begin to report the status; call `on_lost` if the starter goes away."""
        threading.Thread(target=self._report, name="status", daemon=True).start()
        threading.Thread(target=self._watch, args=(on_lost,), name="watch", daemon=True).start()

    def tell(self, kind: str, data: dict[str, Any], blob: bytes = b"") -> None:
        head = json.dumps({"kind": kind, "data": data, "blob": len(blob)})
        with self._lock:
            if not self._closed:
                self._socket.sendall(head.encode() + b"\n" + blob)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._socket.close()

    def _report(self) -> None:
        while not self._closed:
            s = self.status
            try:
                self.tell("status", {"step": s.step, "samples": s.samples, "loss": s.loss, "operation": s.operation})
            except OSError:
                return
            time.sleep(STATUS_S)

    def _watch(self, on_lost: Callable[[], None]) -> None:
        try:
            gone = not self._socket.recv(1)
        except OSError:
            gone = True
        if gone and not self._closed:
            on_lost()
