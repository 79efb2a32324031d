"""A run's folder: spec.toml, events.jsonl, curve.csv, model.safetensors and result.json."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

from hocket.core.errors import UserError

_OURS = ("spec.toml", "events.jsonl", "curve.csv", "model.safetensors", "result.json")


class RunFolder:
    """Writes as the run goes, so that a run which is cut off can still be read."""

    def __init__(self, path: Path, spec: str, *, force: bool, resumed: bool = False) -> None:
        """`force` replaces the run in the folder, `resumed` goes on with it."""
        try:
            path.mkdir(parents=True, exist_ok=force or resumed)
            for name in ("result.json",) if resumed else _OURS:
                (path / name).unlink(missing_ok=True)
            (path / "spec.toml").write_text(spec, encoding="utf-8")
            mode = "a" if resumed else "w"
            self._events = (path / "events.jsonl").open(mode, buffering=1)
            self._curve = (path / "curve.csv").open(mode, newline="", buffering=1)
        except OSError as error:
            if isinstance(error, FileExistsError) and not force:
                raise UserError(
                    f"{path} exists already; choose another --out, or replace the run in it with --force"
                ) from None
            raise UserError(f"cannot write to {path}: {error.strerror or error}; choose another --out") from None
        self.path = path
        self._writer: csv.DictWriter[str] | None = None

    def event(self, rank: int, event: dict[str, Any]) -> None:
        self._events.write(json.dumps({"rank": rank, **event}) + "\n")

    def point(self, point: dict[str, Any]) -> None:
        if self._writer is None:
            self._writer = csv.DictWriter(self._curve, list(point))
            if not self._curve.tell():
                self._writer.writeheader()
        self._writer.writerow(point)

    def model(self, blob: bytes) -> None:
        self._replace("model.safetensors", blob)

    def finish(self, record: dict[str, Any]) -> None:
        self._replace("result.json", (json.dumps(record, indent=1) + "\n").encode())
        self._events.close()
        self._curve.close()

    def _replace(self, name: str, content: bytes) -> None:
        """Write in one piece: a reader never sees half a file."""
        part = self.path / f".{name}.part"
        part.write_bytes(content)
        os.replace(part, self.path / name)
