"""Ranks that meet in memory still let their library's messages travel."""

from __future__ import annotations

import pytest
from test_failures import PROCESSES, run


@pytest.mark.parametrize("name", PROCESSES)
def test_a_message_travels_while_its_sender_waits_for_others(name: str) -> None:
    length = 4_000_000
    assert run(name, "meets_before_its_message_has_left", deadline=30.0, length=length) == [0.0, 5.0 * length, 0.0]
