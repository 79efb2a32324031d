"""A run's events as a Chrome trace, which https://ui.perfetto.dev opens: one process a rank, in its order.

Times are microseconds since training began; under `sim` they are virtual.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

Event = dict[str, Any]

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier", "split")
COMPUTES, TRAVELS = 0, 1
"""A rank's lanes: what it does itself, and what goes on beside it."""
_NAMES = {COMPUTES: "computes", TRAVELS: "in the background"}
_KINDS = {"send": "communication", "recv": "communication", "background": "communication", "wait": "wait"}
_TOLD = ("bytes", "peer", "kind", "step", "samples", "staleness", "version", "worker")


class Timeline:
    """Takes the events of all ranks as they come."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._events: defaultdict[int, list[Event]] = defaultdict(list)

    def add(self, rank: int, events: Sequence[Event]) -> None:
        self._events[rank].extend(events)

    def to_json(self) -> bytes:
        """The file."""
        for events in self._events.values():
            events.sort(key=lambda event: float(event["t"]))
        shown = [*self._lanes(), *self._spans()]
        about = {"made by": "hocket", "lanes": "one process a rank"}
        return json.dumps({"traceEvents": shown, "displayTimeUnit": "ms", "otherData": about}).encode()

    def _lanes(self) -> Iterator[Event]:
        for rank in sorted(self._events):
            name = f"worker {rank}" if rank < self._workers else f"server {rank - self._workers}"
            yield _about(rank, COMPUTES, "process_name", name=name)
            yield _about(rank, COMPUTES, "process_sort_index", sort_index=rank)
            for lane in sorted({_lane(event) for event in self._events[rank]}):
                yield _about(rank, lane, "thread_name", name=_NAMES[lane])

    def _spans(self) -> Iterator[Event]:
        for rank, events in sorted(self._events.items()):
            for event in events:
                yield _span(rank, event)
                if event.get("waited", 0.0) > 0:
                    yield _wait(rank, event, min(event["waited"], event["seconds"]))
        yield from self._waits()

    def _waits(self) -> Iterator[Event]:
        """In a collective all wait for the last; which one that was can be told where all workers met in the same."""
        of_each = {
            rank: [event for event in events if event["event"] in COLLECTIVES]
            for rank, events in self._events.items()
            if rank < self._workers
        }
        if len({tuple(event["event"] for event in events) for events in of_each.values()}) != 1:
            return
        for met in zip(*of_each.values(), strict=True):
            last = max(event["t"] for event in met)
            for rank, event in zip(of_each, met, strict=True):
                if (waited := min(last - event["t"], event["seconds"])) > 0:
                    yield _wait(rank, event, waited)


def _lane(event: Event) -> int:
    return TRAVELS if event["event"] == "background" else COMPUTES


def _span(rank: int, event: Event) -> Event:
    what = event["event"]
    name = what if what != "background" else "all_reduce"
    if kind := event.get("kind"):
        name = f"{what} {kind}"  # the steps of a ring, one by one
    told = {key: event[key] for key in _TOLD if key in event}
    category = "communication" if what in COLLECTIVES else _KINDS.get(what, "computing")
    placed = {"name": name, "cat": category, "pid": rank, "tid": _lane(event), "ts": _micro(event["t"]), "args": told}
    return placed | {"ph": "X", "dur": _micro(event["t"] + event["seconds"]) - _micro(event["t"])}


def _wait(rank: int, event: Event, waited: float) -> Event:
    begin, end = _micro(event["t"]), _micro(event["t"] + waited)
    return {"name": "wait", "cat": "wait", "ph": "X", "pid": rank, "tid": COMPUTES, "ts": begin, "dur": end - begin}


def _about(rank: int, lane: int, what: str, **told: Any) -> Event:
    return {"name": what, "ph": "M", "pid": rank, "tid": lane, "ts": 0, "args": told}


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)
