"""Shared by all tests: one BLAS thread, and where the real data lies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"

_shared = Path(__file__).parents[2] / "shared" / "data"
if "HOCKET_DATA" not in os.environ and _shared.is_dir():
    os.environ["HOCKET_DATA"] = str(_shared)


LONG = {
    "test_compressed_runs.py",
    "test_examples.py",
    "test_own_places.py",
    "test_own_task_package.py",
    "test_studies.py",
}
"""Files that together take as long as many others."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="every combination and every repetition")


@pytest.fixture
def thorough(request: pytest.FixtureRequest) -> bool:
    """Whether a test should repeat what it does as often as if time did not matter."""
    return bool(request.config.getoption("--thorough"))


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What starts many processes takes minutes on 2 cores: `make test-slow` runs it, and so does CI."""
    if not config.getoption("--thorough"):
        beyond = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=beyond)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
    for item in items:
        values = getattr(getattr(item, "callspec", None), "params", {})
        crowd = values.get("name") in ("mpi", "torch") and values.get("size", 0) > 3
        if "real" in item.path.parts or item.path.name in LONG or crowd or values.get("workers") == 5:
            item.add_marker(pytest.mark.slow)
