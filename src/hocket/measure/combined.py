"""What all ranks tell of their parts, put together: the fields of a Result that come from the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from hocket.measure.result import COMMUNICATION, TIMES, staleness_summary

WORKER_KEYS = (
    "seconds", *TIMES, *COMMUNICATION, "bytes_sent", "messages", "steps", "samples", "own_metric",
)  # fmt: skip

Reports = Sequence[dict[str, Any]]


def combined(ranks: Reports, servers: Reports, *, simulated: bool, parts: int = 1) -> dict[str, Any]:
    """Of reports as drivers/report.py makes them. Where a worker is several ranks, each with a part of its model, the
    first of them speaks for all."""
    workers = ranks[::parts]
    first, seconds = workers[0], max(r["seconds"] for r in workers)
    histogram: Counter[int] = Counter()
    for report in servers or workers:  # where there are servers, updates happen there
        histogram.update({int(k): v for k, v in report["staleness"].items()})
    samples = sum(r["samples"] for r in workers)
    return dict(
        verdict=first["verdict"],
        seconds=first["real_seconds"] if simulated else seconds,
        virtual_seconds=seconds if simulated else None,
        samples_per_s=None if first["verdict"] == "diverged" else samples / max(seconds, 1e-9),
        steps=first["steps_done"],
        epochs=first["epochs"],
        bytes_sent=sum(r["bytes_sent"] for r in [*ranks, *servers]),
        staleness=staleness_summary(histogram),
        per_worker=[{k: r[k] for k in WORKER_KEYS if k in r} for r in workers],
        per_server=[{k: r[k] for k in WORKER_KEYS if k in r} for r in servers],
        consensus_distance=first["consensus_distance"],
        parameters=first["parameters"],
        shared=_with_rate(first["shared"], seconds) if "shared" in first else None,
        pipeline=[r["pipeline"] for r in ranks if "pipeline" in r],
        compile_seconds=first.get("compile_seconds"),
        diverged_at_step=min((r["diverged_at_step"] for r in workers if r["diverged_at_step"]), default=None),
    )


def _with_rate(shared: dict[str, Any], seconds: float) -> dict[str, Any]:
    return {"updates": shared["updates"], "updates_per_s": shared["updates"] / max(seconds, 1e-9)} | shared
