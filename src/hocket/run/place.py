"""Where a run's record goes."""

from __future__ import annotations

import datetime
from pathlib import Path

from hocket.core.errors import UserError


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


def make_folder(out: Path, force: bool) -> None:
    """Make the folder of several runs, which may exist already if `force` says so."""
    try:
        out.mkdir(parents=True, exist_ok=force)
    except FileExistsError:
        what = ", or replace the runs in it with --force" if out.is_dir() else ": a file is called so"
        raise UserError(f"{out} exists already; choose another --out{what}") from None
    except OSError as error:
        raise UserError(f"cannot make the folder {out}: {error.strerror}; choose another --out") from None


def check_name(path: Path) -> None:
    """Refuse a name that no file system takes."""
    try:
        str(path).encode()
        path.exists()
    except UnicodeEncodeError:
        raise UserError(f"the name of the folder must be UTF-8 text; got {str(path)!r}; choose another --out") from None
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write to {path}: {what}; choose another --out") from None
