"""Models whose size follows from the user's data or options: will they fit?"""

from __future__ import annotations

import os

from hocket.core.errors import UserError


def machine_bytes() -> int:
    """The main memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_fits(nbytes: int, what: str, remedy: str) -> None:
    """Refuse what would take more than half of the machine's memory, for one worker alone."""
    if nbytes > machine_bytes() / 2:
        raise UserError(
            f"{what} would take about {gigabytes(nbytes)} a worker, and this machine has "
            f"{gigabytes(machine_bytes())}; {remedy}"
        )


def gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.1f} GB"
