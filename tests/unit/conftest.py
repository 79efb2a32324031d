"""Examples that are drawn: only these tests draw any, and the others run where Hypothesis is not installed."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings


def pytest_configure(config: pytest.Config) -> None:
    """They take as long as a busy machine makes them, and are other ones each time if asked for."""
    repeated = not config.getoption("--thorough")
    settings.register_profile(
        "hocket", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=repeated
    )
    settings.load_profile("hocket")
