"""Shared by tests with real processes: a test that fails halfway leaves none of them running."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from hocket.engines.guard import descendants


@pytest.fixture(autouse=True)
def _end_what_was_started() -> Iterator[None]:
    before = descendants()
    yield
    for pid in descendants() - before:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def pytest_configure() -> None:
    """Whoever starts the tests in the background of a script has them ignore Ctrl-C, which they send themselves."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
