"""Finding the files of a data set: on this machine, else on a public mirror. Nothing unverified is used."""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import io
import os
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hocket.core.errors import UserError

TIMEOUT_S = 10.0


@dataclass(frozen=True)
class DataFile:
    """A file as its publishers made it."""

    name: str
    size: int
    md5: str
    zipped_as: str = ""
    """The archive that mirrors have it in, alone; empty where they have the file itself."""

    def fault(self, content: bytes) -> str | None:
        """What is wrong with this content, if anything."""
        if len(content) < self.size:
            return f"truncated: {len(content)} of {self.size} bytes"
        if len(content) > self.size:
            return f"too long: {len(content)} bytes instead of {self.size}"
        md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
        return None if md5 == self.md5 else f"wrong checksum: md5 {md5} instead of {self.md5}"


def find(files: Sequence[DataFile], folder: str, mirrors: Sequence[str], data: Path | None) -> list[Path]:
    """Where each of the files of a data set is, verified; those found nowhere are fetched into the cache.

    They are looked for in `data`, $HOCKET_DATA and the cache, there in `folder` and at the top.
    """
    if data is not None and not os.path.isdir(os.path.expanduser(data)):
        raise UserError(f"--data {data}: there is no such directory; name the one that holds your data sets")
    roots = [data, os.environ.get("HOCKET_DATA"), cache()]
    places = [Path(os.path.expanduser(root)) for root in roots if root]
    return [_find_or_fetch(file, files, folder, mirrors, places) for file in files]


def cache() -> Path:
    """Where fetched files are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hocket"


def _find_or_fetch(
    file: DataFile, files: Sequence[DataFile], folder: str, mirrors: Sequence[str], places: Sequence[Path]
) -> Path:
    path = _find(file, folder, places)
    if path is not None:
        return path
    target = cache() / folder / file.name
    remedy = f"put {', '.join(f.name for f in files)} into a directory DIR and pass --data DIR"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time():
            # Another rank may have fetched it while this one waited for its turn.
            path = _find(file, folder, places)
            if path is not None:
                return path
            content, faults = _fetch(file, mirrors)
            if content is not None:
                _write(target, content)
                return target
    except OSError as error:
        raise UserError(
            f"cannot write {target}: {error.strerror or error}; set XDG_CACHE_HOME to a directory that can "
            f"be written, or {remedy}"
        ) from error
    raise UserError(
        f"data set {folder}: {file.name} is not in {', '.join(map(str, places))}, and no mirror gave it "
        f"({'; '.join(faults)}); {remedy}"
    )


def _find(file: DataFile, folder: str, places: Sequence[Path]) -> Path | None:
    for place in places:
        for path in (place / folder / file.name, place / file.name):
            if os.path.isfile(path):
                _verify(file, path)
                return path
    return None


def _verify(file: DataFile, path: Path) -> None:
    """Refuse a bad file rather than look further: whoever put it there believes that it is used."""
    try:
        fault = file.fault(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or error}; make it readable, or pass --data DIR with another copy"
        ) from error
    if fault:
        raise UserError(
            f"{path} is damaged ({fault}); delete it and hocket will fetch it, or pass --data DIR with a good copy"
        )


def _fetch(file: DataFile, mirrors: Sequence[str]) -> tuple[bytes | None, list[str]]:
    """The content from the first mirror that gives it unharmed, and what was wrong with those before."""
    faults = []
    for mirror in mirrors:
        url = mirror + (file.zipped_as or file.name)
        print(f"hocket: fetching {url} ({file.size / 1e6:.1f} MB)", file=sys.stderr, flush=True)
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
                content: bytes = response.read(file.size + 1)
            if file.zipped_as:
                content = _unzipped(file, content)
        except (OSError, http.client.HTTPException, zipfile.BadZipFile, KeyError) as error:
            faults.append(f"{mirror}: {getattr(error, 'reason', None) or error}")
            continue
        fault = file.fault(content)
        if fault is None:
            return content, faults
        faults.append(f"{mirror}: {fault}")
    return None, faults


def _unzipped(file: DataFile, content: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive, archive.open(file.name) as found:
        return found.read(file.size + 1)


def _write(target: Path, content: bytes) -> None:
    """Other processes see the whole file or none."""
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as part:
        try:
            part.write(content)
            part.flush()
            os.replace(part.name, target)
        except BaseException:
            os.unlink(part.name)
            raise


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """All ranks of a run want the same files at once; one fetches, the others wait for it."""
    with open(cache() / "lock", "a") as lock:  # closing it, or the end of the process, lets the next one in
        with suppress(OSError):  # some network file systems have no locks: then every rank fetches
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
