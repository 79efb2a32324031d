"""Text files with one sample a line, as users bring them: plain or gzipped, and possibly broken."""

from __future__ import annotations

import gzip
import re
import stat
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from hocket.core.errors import UserError, shown

NUMBER = re.compile(rb"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")

Numbers = np.ndarray[Any, np.dtype[np.float64]]
Positions = np.ndarray[Any, np.dtype[np.int64]]


def read(path: Path) -> bytes:
    """What is in the file, unpacked if it is gzipped."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise UserError(f"{path} is a directory; name a file")
        if not stat.S_ISREG(mode):  # a pipe would block for ever, and can be read only once
            raise UserError(f"{path} is not a regular file; write the data into one, and name it")
        content = path.read_bytes()
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except UserError:
        raise
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is a damaged gzip file: {error}") from None
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        raise UserError(f"cannot read {shown(str(path))}: {getattr(error, 'strerror', None) or error}") from None
    if not content.strip():
        raise UserError(f"{path} is empty; one sample a line is expected")
    return content


def broken(path: Path, number: int, line: bytes, wanted: str) -> UserError:
    """The error for a line that cannot be read, by its number from 1."""
    shown = line.decode(errors="replace").strip()
    shown = shown if len(shown) <= 40 else shown[:37] + "..."
    return UserError(f"{path} line {number}: expected {wanted}; got {shown!r}")


def number(token: bytes) -> float | None:
    """The finite number that a token is, if it is one."""
    if not NUMBER.fullmatch(token):
        return None
    value = float(token)
    return value if abs(value) <= float(np.finfo(np.float32).max) else None


def numbers(text: bytes) -> Numbers | None:
    """All numbers of a text without anything else in it; None if there is something else."""
    if text.translate(None, b"0123456789+-.eE \t\r\n"):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)  # how numpy says that it stopped at what is no number
            found = np.fromstring(text, dtype=np.float64, sep=" ")
    except (ValueError, DeprecationWarning):
        return None
    return found if np.all(np.abs(found) <= np.finfo(np.float32).max) else None


def tokens(text: bytes) -> tuple[Positions, Positions, Positions]:
    """Where tokens begin and end, and the number of tokens on each line that has any."""
    blank = np.frombuffer(text, np.uint8) <= ord(" ")
    edges = np.flatnonzero(np.diff(blank, prepend=True, append=True))
    begin, end = edges[0::2], edges[1::2]
    line_ends = np.append(np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n")), len(text))
    per_line = np.diff(np.searchsorted(begin, line_ends), prepend=0)
    return begin, end, per_line[per_line > 0]
