"""A page on this machine that follows a run or a study: bound to 127.0.0.1, and it only reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hocket.core.errors import UserError
from hocket.report.answer import story_of
from hocket.report.page import page_data, render
from hocket.report.records import Record, read_records
from hocket.report.unfinished import unfinished


def serve(path: Path, port: int, say: Callable[[str], None]) -> None:
    """Until Ctrl-C."""
    if not path.is_dir():
        raise UserError(f"there is no folder {path} to watch")
    try:
        server = make_server(path, port)
    except OSError as error:
        raise UserError(f"cannot listen on port {port}: {error.strerror or error}; choose another --port") from None
    say(f"http://127.0.0.1:{server.server_port}/")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()


def make_server(path: Path, port: int) -> ThreadingHTTPServer:
    """`/` is the page, `/data` what it shows; nothing else, and nothing can be written."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            if host not in ("127.0.0.1", "localhost"):  # a page elsewhere shall not read it through the user's browser
                self.send_error(403)
            elif self.path == "/":
                self._answer("text/html; charset=utf-8", render(seen(path), live="/data"))
            elif self.path == "/data":
                self._answer("application/json", json.dumps(seen(path), allow_nan=False))
            else:
                self.send_error(404)

        def _answer(self, kind: str, text: str) -> None:
            content = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def seen(path: Path) -> dict[str, Any]:
    """What is there now: runs that are over, and those under way as far as they have come."""
    try:
        records, problems = read_records([path])
    except UserError:
        records, problems = [], []
    going: list[Record] = unfinished(path)
    title = path.resolve().name
    if not records and not going:
        return {"title": title, "verdict": ["Nothing has been written yet."], "sections": [], "made": ""}
    story, unread = story_of(path)
    data = page_data([*records, *going], [*problems, *unread], story.title or title, story)
    if going:
        data["verdict"].insert(
            0, f"{len(going)} under way: {', '.join(str(record.path.name) for record in going[:6])}."
        )
    return data
