"""Shared by tests with real processes: a test that fails halfway leaves none of them running."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _end_what_was_started() -> Iterator[None]:
    before = children()
    yield
    for pid in children() - before:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # its ranks end with it


def children() -> set[int]:
    """Processes of this one, whichever of its threads started them."""
    lists = Path("/proc/self/task").glob("*/children")
    return {int(pid) for path in lists for pid in path.read_text().split()}
