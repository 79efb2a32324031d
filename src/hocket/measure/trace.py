"""The event log of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hocket.core.clock import Clock
from hocket.core.spans import Spans, unseen

DETAIL = 10_000
"""Events that each rank records one by one, unless the user says otherwise; what follows is only counted."""


class Trace:
    """Events in the order in which they ended. The first `limit` are kept, the rest counted."""

    def __init__(self, limit: int = DETAIL, *, fine: bool = False) -> None:
        self._limit = limit
        self.fine = fine
        """Whether it is drawn as a timeline, and has to know what a gradient and a step are made of."""
        self._events: list[tuple[str, float, float, dict[str, Any]]] = []
        self.dropped = 0
        self.origin_s = 0.0
        """When training began, on the rank's clock: events are timed from there, as the learning curve is."""

    def add(self, event: str, start_s: float, end_s: float, **fields: Any) -> None:
        if self._limit:
            self._limit -= 1
            self._events.append((event, start_s, end_s, fields))
        else:
            self.dropped += 1

    def spans(self, clock: Clock) -> Spans:
        """Adds an event for what is done inside, if the log is that fine."""
        if not self.fine:
            return unseen

        @contextmanager
        def span(event: str) -> Iterator[None]:
            began = clock.now()
            yield
            self.add(event, began, clock.now())

        return span

    def take(self) -> list[dict[str, Any]]:
        """The events since the last call, ready for JSON."""
        events, self._events = self._events, []
        return [
            {"event": event, "t": round(start - self.origin_s, 9), "seconds": round(end - start, 9), **fields}
            for event, start, end, fields in events
        ]
