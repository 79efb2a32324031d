"""Where a run shows how far it is; `hocket.app.display` has those that people look at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from hocket.core.status import Status


class Display(Protocol):
    def begin(self, title: str, steps: int, words: float | None = None) -> None:
        """`words` is how many of them a sample is, where samples are pieces of a text."""

    def update(self, statuses: Sequence[Status]) -> None: ...
    def metric(self, name: str, value: float | None, loss: float | None) -> None: ...
    def note(self, line: str) -> None: ...
    def end(self, record: dict[str, Any]) -> None:
        """The run is over; `record` is what result.json holds."""


class Silent:
    """Shows nothing."""

    def begin(self, title: str, steps: int, words: float | None = None) -> None:
        pass

    def update(self, statuses: Sequence[Status]) -> None:
        pass

    def metric(self, name: str, value: float | None, loss: float | None) -> None:
        pass

    def note(self, line: str) -> None:
        pass

    def end(self, record: dict[str, Any]) -> None:
        pass
