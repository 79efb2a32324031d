"""Where a run's record goes. What is there already is only touched when the new run has begun."""

from __future__ import annotations

import datetime
import fcntl
import os
from pathlib import Path

from hocket.core.errors import UserError
from hocket.measure.folder import RunFolder
from hocket.run.past import cut_curve


class Place:
    """A run's folder to be: taken at once where it is new, and when the first rank trains where a run is replaced."""

    def __init__(self, path: Path, spec: str, *, force: bool = False, resumed_at: int | None = None) -> None:
        """`force` replaces the run that is there, `resumed_at` goes on with it from a step."""
        self.path, self._spec, self._force, self._resumed_at = path, spec, force, resumed_at
        self._folder: RunFolder | None = None
        self._lock = -1
        _check_name(path)
        if path.is_dir() and (force or resumed_at is not None):
            self._claim()
            if not os.access(path, os.W_OK | os.X_OK):
                raise UserError(f"cannot write to {path}: Permission denied; choose another --out")
        else:
            self.open()
            self._claim()

    @property
    def folder(self) -> RunFolder | None:
        """The folder, once it is open."""
        return self._folder

    def open(self) -> RunFolder:
        if self._folder is None:
            resumed = self._resumed_at is not None
            if self._resumed_at is not None:
                cut_curve(self.path, self._resumed_at)
            self._folder = RunFolder(self.path, self._spec, force=self._force, resumed=resumed)
        return self._folder

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _claim(self) -> None:
        """Keep others out for as long as this run lasts, however it ends."""
        self._lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise UserError(f"another run is writing to {self.path}; wait for it, or choose another --out") from None
        except OSError:
            pass  # a file system without locks


def new_folder(name: str) -> Path:
    """Make a folder under runs/, named after what it holds and the time; many may ask at once."""
    name = f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    number = 1
    while True:
        path = Path("runs") / (f"{name}-{number}" if number > 1 else name)
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            if Path("runs").is_dir():
                number += 1
                continue
            raise UserError("cannot make the folder runs: a file is called so; choose another --out") from None
        except OSError as error:
            raise UserError(f"cannot make the folder {path}: {error.strerror}; choose another --out") from None


def _check_name(path: Path) -> None:
    try:
        str(path).encode()
        path.exists()
    except UnicodeEncodeError:
        raise UserError(f"the name of the folder must be UTF-8 text; got {str(path)!r}; choose another --out") from None
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write to {path}: {what}; choose another --out") from None
