"""A run's folder: spec.toml, events.jsonl, curve.csv, model and best .safetensors, result.json, checkpoints/ and
vectors/."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hocket.core.errors import UserError
from hocket.measure import disk

_SPEC, _EVENTS, _CURVE, _MODEL, _RESULT = "spec.toml", "events.jsonl", "curve.csv", "model.safetensors", "result.json"
_CHECKPOINTS, VECTORS, BEST, TIMELINE = "checkpoints", "vectors", "best.safetensors", "timeline.json"
_FOLDERS = (_CHECKPOINTS, VECTORS)
_OURS = (_SPEC, _EVENTS, _CURVE, _MODEL, BEST, TIMELINE, _RESULT, *_FOLDERS)
"""What --force replaces; whatever else is in the folder stays."""
_NEW, _OLD, _LOCK = ".new", ".old", ".lock"

_SPARE = 2**20
"""Bytes of the events that make room for the result where the disk is full."""

KEPT = 2
"""Checkpoints: should the newest not load, there is the one before it."""


class RunFolder:
    """Writes as the run goes, so that a run which is cut off can still be read, and resumed.

    A run that is replaced (`force`) or continued (`resumed`) stays as it was until the new one has begun: until
    `start`, or the first that is heard of it. Where something cannot be written, training goes on, and `finish` says
    what is missing.
    """

    def __init__(self, path: Path, spec_toml: str, *, force: bool = False, resumed: bool = False) -> None:
        self.path = path
        self._resumed = resumed
        self._failed: dict[str, OSError] = {}
        self._cut_at: float | None = None
        try:
            if resumed and not path.is_dir():
                raise UserError(f"there is no run {path} to resume")
            self._made = not path.exists()
            path.mkdir(parents=True, exist_ok=force or resumed)
            self._lock = disk.hold(path / _LOCK)
            if self._lock is None:
                raise UserError(f"a run is going on in {path}; wait for its end, or choose another --out")
            self._prepare(spec_toml)
        except OSError as error:
            if isinstance(error, FileExistsError) and not force:
                raise UserError(
                    f"{path} exists already; choose another --out, or replace the run in it with --force"
                ) from None
            raise UserError(f"cannot write to {path}: {error.strerror or error}; choose another --out") from None

    def _prepare(self, spec_toml: str) -> None:
        """Write the first files where they disturb nobody; with nothing to replace, start at once."""
        try:
            _clean_up(self.path)
            if self._resumed and not (self.path / _SPEC).is_file():
                raise UserError(f"there is no run in {self.path} to resume")
            self._pending = any((self.path / name).exists() for name in _OURS)
            new = self.path / _NEW
            new.mkdir()
            disk.write(new / _SPEC, spec_toml.encode())
            logs = self.path if self._resumed else new
            self._events, self._curve = disk.Log(logs / _EVENTS, _SPARE), disk.Log(logs / _CURVE)
            self._columns = _columns(logs / _CURVE)
            if not self._pending:
                self._swap()
        except BaseException:
            shutil.rmtree(self.path / _NEW, ignore_errors=True)
            self._unlock()
            if self._made:
                _delete(self.path)
            raise

    def start(self) -> None:
        """The ranks have begun: what this run replaces goes away."""
        if self._pending:
            self._pending = False
            self._swap()
            if self._cut_at is not None:
                self._cut_curve(self._cut_at)

    def _swap(self) -> None:
        """Old files out, new ones in, spec.toml first: `_clean_up` tells by it how far a kill let this come."""
        _move(self.path, self.path / _OLD, (_RESULT,) if self._resumed else _OURS)
        _move(self.path / _NEW, self.path, _OURS)
        _delete(self.path / _OLD)
        (self.path / _NEW).rmdir()

    def event(self, rank: int, event: dict[str, Any]) -> None:
        self._log(_EVENTS, lambda: self._events.add(json.dumps({"rank": rank, **event}) + "\n"))

    def point(self, point: dict[str, Any]) -> None:
        self._log(_CURVE, lambda: self._add_row(point))

    def model(self, blob: bytes) -> None:
        self._try(_MODEL, lambda: disk.write(self.path / _MODEL, blob))

    def best(self, blob: bytes) -> None:
        """The best model so far."""
        self._try(BEST, lambda: disk.write(self.path / BEST, blob))

    def timeline(self, blob: bytes) -> None:
        self._try(TIMELINE, lambda: disk.write(self.path / TIMELINE, blob))

    def vectors(self, write: Callable[[Path], None]) -> None:
        """Let `write` put files of its own into a folder vectors/, which is there only if it does."""
        self._try(VECTORS, lambda: self._write_vectors(write))

    def checkpoint(self, name: str, blob: bytes) -> None:
        """Write checkpoints/NAME, and keep the newest ones alone.

        One with a later name is older nevertheless: it counts the steps of fewer workers.
        """
        self._try(_CHECKPOINTS, lambda: self._write_checkpoint(name, blob))

    def rewind(self, epoch: float) -> None:
        """The resumed run goes on from there: the curve's points behind it go; events stay as they are."""
        self._cut_at = epoch
        if not self._pending:
            self._try(_CURVE, lambda: self._cut_curve(epoch))

    def finish(self, record: dict[str, Any]) -> str | None:
        """Write the result, and let go of the folder. Returns one line on what could not be written, if anything.

        A run that never began leaves no result where it was to replace or continue another.
        """
        if self._pending:
            self.discard()
            return None
        if self._failed:
            record = record | {"not_written": {name: _reason(error) for name, error in self._failed.items()}}
        content = (json.dumps(record, indent=1) + "\n").encode()
        self._try(_RESULT, lambda: disk.write(self.path / _RESULT, content))
        self._close()
        if not self._failed:
            return None
        reasons = ", ".join(dict.fromkeys(map(_reason, self._failed.values())))
        return f"could not write {', '.join(self._failed)} to {self.path}: {reasons}; {disk.room(self.path)}"

    def discard(self) -> None:
        """The run never began: leave the folder as it was before."""
        self._close()
        if self._pending:
            shutil.rmtree(self.path / _NEW, ignore_errors=True)
        elif self._made:
            _delete(self.path)

    def _close(self) -> None:
        self._events.close()
        self._curve.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            with suppress(OSError):
                (self.path / _LOCK).unlink()
            self._lock.close()
            self._lock = None

    def _log(self, name: str, add: Callable[[], None]) -> None:
        """A log that failed once stays as it is: with lines missing in the middle it would mislead."""
        if name not in self._failed:
            self._try(name, add)

    def _try(self, name: str, write: Callable[[], None]) -> None:
        try:
            self.start()
            write()
            self._failed.pop(name, None)
        except OSError as error:
            self._failed[name] = error

    def _add_row(self, point: dict[str, Any]) -> None:
        rows = [] if self._columns else [list(point)]
        columns = self._columns or list(point)
        self._curve.add(_csv([*rows, [point.get(column) for column in columns]]))
        self._columns = columns

    def _cut_curve(self, epoch: float) -> None:
        path = self.path / _CURVE
        with path.open(newline="") as file:
            header, *rows = list(csv.reader(file)) or [[]]
        if header:
            at = header.index("epoch")
            disk.write(path, _csv([header, *(row for row in rows if float(row[at]) <= epoch)]).encode())
            self._curve.close()
            self._curve = disk.Log(path)

    def _write_vectors(self, write: Callable[[Path], None]) -> None:
        new = self.path / f"{VECTORS}{disk.PART}"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        write(new)
        shutil.rmtree(self.path / VECTORS, ignore_errors=True)
        if any(new.iterdir()):
            os.replace(new, self.path / VECTORS)
        else:
            new.rmdir()

    def _write_checkpoint(self, name: str, blob: bytes) -> None:
        folder = self.path / _CHECKPOINTS
        folder.mkdir(exist_ok=True)
        disk.write(folder / name, blob)
        by_age = sorted(folder.iterdir(), key=lambda file: (file.name == name, file.stat().st_mtime_ns, file.name))
        for file in by_age[:-KEPT] + [file for file in by_age[-KEPT:] if file.name > name]:
            file.unlink()


def _clean_up(path: Path) -> None:
    """Remove what a killed run left: files half written, and a swap half done, which is undone or completed."""
    shutil.rmtree(path / f"{VECTORS}{disk.PART}", ignore_errors=True)
    for part in [*(path / f"{name}{disk.PART}" for name in _OURS), *(path / _CHECKPOINTS).glob(f"*{disk.PART}")]:
        part.unlink(missing_ok=True)
    if (path / _NEW / _SPEC).exists():
        _move(path / _OLD, path, _OURS)
    else:
        _move(path / _NEW, path, _OURS)
    for leftover in (_OLD, _NEW):
        shutil.rmtree(path / leftover, ignore_errors=True)


def _move(source: Path, to: Path, names: Iterable[str]) -> None:
    for name in names:
        if (source / name).exists():
            to.mkdir(exist_ok=True)
            os.replace(source / name, to / name)


def _delete(folder: Path) -> None:
    """Our files of a folder, and the folder itself if nothing else is in it."""
    for name in _OURS:
        if name in _FOLDERS:
            shutil.rmtree(folder / name, ignore_errors=True)
        else:
            (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def _columns(path: Path) -> list[str]:
    with path.open(newline="") as file:
        return next(csv.reader(file), [])


def _csv(rows: Iterable[list[Any]]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue()


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
