"""A headless Chromium, driven by chromedriver over its HTTP protocol: nothing to install beside the two."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

DRIVER, CHROMIUM = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome")
MISSING = "" if DRIVER and CHROMIUM else "needs chromium and chromedriver"
_START_S = 30


class Browser:
    """One window."""

    def __init__(self, address: str, session: str) -> None:
        self._base = f"{address}/session/{session}"

    def open(self, url: str) -> None:
        _ask(f"{self._base}/url", {"url": url})

    def run(self, script: str) -> Any:
        """What a script's `return` gives."""
        return _ask(f"{self._base}/execute/sync", {"script": script, "args": []})

    def resize(self, width: int, height: int = 1200) -> None:
        """The page itself, not the window: a window is never as narrow as a telephone."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        _ask(f"{self._base}/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": metrics})

    def until(self, script: str, limit_s: float = 20) -> None:
        """Wait until a script gives something true."""
        limit = time.monotonic() + limit_s
        while not self.run(script):
            assert time.monotonic() < limit, script
            time.sleep(0.05)

    def console(self) -> list[str]:
        """Errors and warnings since the last call."""
        return [entry["message"] for entry in _ask(f"{self._base}/se/log", {"type": "browser"})]

    def requests(self) -> list[str]:
        """Addresses that the page asked for since the last call."""
        found = []
        for entry in _ask(f"{self._base}/se/log", {"type": "performance"}):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return found

    def close(self) -> None:
        _ask(self._base, None, "DELETE")


@contextmanager
def browser() -> Iterator[Browser]:
    assert DRIVER and CHROMIUM
    port = _free_port()
    driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait(address)
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        wanted = {
            "goog:chromeOptions": {"binary": CHROMIUM, "args": arguments},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        started = _ask(f"{address}/session", {"capabilities": {"alwaysMatch": wanted}})
        window = Browser(address, started["sessionId"])
        try:
            yield window
        finally:
            window.close()
    finally:
        driver.terminate()
        driver.wait()


def _ask(url: str, body: Any, method: str = "POST") -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["value"]


def _wait(address: str) -> None:
    limit = time.monotonic() + _START_S
    while True:
        try:
            if _ask(f"{address}/status", None, "GET")["ready"]:
                return
        except OSError:
            pass
        assert time.monotonic() < limit, "chromedriver does not answer"
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
