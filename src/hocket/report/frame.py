"""Runs as rows: settings and results, for CSV, Parquet and pandas."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hocket.core.errors import UserError
from hocket.measure.result import Result
from hocket.report.records import Record, grouped, read_records, record_of

_RESULTS = (
    "verdict", "seconds", "virtual_seconds", "samples_per_s", "steps", "epochs_done", "train_loss", "test_loss",
    "metric", "test_metric", "train_metric", "target", "time_to_target", "bytes_sent", "staleness_mean",
    "staleness_max", "consensus_distance", "parameters", "learnt", "diverged_at_step", "error", "folder",
)  # fmt: skip
_FIRST = ("task", "strategy", "workers", "engine", "driver", "seed")


def row(record: Record) -> dict[str, Any]:
    """What was asked of a run, then what it came to; what is not known is None."""
    spec = {key: json.dumps(value) if isinstance(value, dict) else value for key, value in record.spec.items()}
    settings = {key: record[key] for key in _FIRST} | {k: v for k, v in spec.items() if k not in _FIRST}
    stale = record["staleness"] or {}
    own = {
        "epochs_done": record["epochs"],
        "test_metric": record.metric,
        "train_metric": record[f"train_{record['metric']}"],
        "staleness_mean": stale.get("mean"),
        "staleness_max": stale.get("max"),
        "folder": record.path.name,
    }
    times = {f"seconds_to_loss_{part}": at for part, at in (record["time_to_loss"] or {}).items()}
    return settings | {key: own[key] if key in own else record[key] for key in _RESULTS if key != "target"} | {
        "target": record["target"],
        **times,
    }  # fmt: skip


def frame_of(records: Sequence[Record]) -> Any:
    """A pandas frame, one row a run; settings first."""
    try:
        import pandas
    except ImportError:
        raise UserError("a table of runs needs pandas; install it with: pip install 'hocket[report]'") from None
    rows = [row(record) for record in records]
    settings = dict.fromkeys(key for entry in rows for key in entry if key not in (*_RESULTS, *_times(rows)))
    results = dict.fromkeys([*_RESULTS, *_times(rows)])
    return pandas.DataFrame(rows, columns=[*settings, *results]).convert_dtypes()


def _times(rows: Iterable[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for entry in rows for key in entry if key.startswith("seconds_to_loss_")))


def load_runs(path: str | Path) -> Any:
    """Every run below a folder, as a pandas frame: one row a run, settings and results.

    Runs that cannot be read are left out; `frame.attrs["problems"]` names them.
    """
    records, problems = read_records([Path(path)])
    frame = frame_of(records)
    frame.attrs["problems"] = problems
    return frame


def plot(result: Result | Sequence[Result] | str | Path) -> Any:
    """A matplotlib figure of learning curves against time: of a result, of several, or of the runs below a folder."""
    from hocket.report.charts import learning
    from hocket.report.static import draw

    if isinstance(result, (str, Path)):
        records, _ = read_records([Path(result)])
    elif isinstance(result, Result):
        records = [record_of(result)]
    else:
        records = [record_of(one, number) for number, one in enumerate(result)]
    if not records or len({record.simulated for record in records}) > 1:
        raise UserError("plot takes runs of one kind of time: all simulated, or all real")
    clock = "virtual time" if records[0].simulated else "time"
    figures = learning(grouped(records), clock)
    if not figures:
        raise UserError("there is no learning curve to plot: the run ended before its first point")
    return draw(figures[0])
