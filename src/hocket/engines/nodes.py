"""The memory domains of this machine, Linux' nodes: which of them workers and what they share are put in."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hocket.core.errors import UserError
from hocket.engines.binding import allowed_cores, tie_to

Place = Literal["any", "one", "spread"]
"""`one` puts all workers and what they share into one domain, `spread` both over all domains, in turn."""

NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True)
class Placement:
    """The cores of each domain that is used."""

    domains: Sequence[frozenset[int]]

    def settle(self, rank: int) -> None:
        """Tie the calling thread to the cores of its rank's domain."""
        if self.domains:
            tie_to(self.domains[rank % len(self.domains)])

    def lay_out(self, memory: mmap.mmap) -> None:
        """Put new memory into the domains, page by page in turn: a page lies where it is touched first."""
        if not self.domains:
            return
        before = allowed_cores()
        try:
            for i, cores in enumerate(self.domains):
                tie_to(cores)
                for page in range(i * mmap.PAGESIZE, len(memory), len(self.domains) * mmap.PAGESIZE):
                    memory[page] = 0
        finally:
            tie_to(before)


ANYWHERE = Placement(())


def placement(place: Place, size: int) -> Placement:
    """Where so many ranks and their memory shall be; refuses what this machine has no room for."""
    if place == "any":
        return ANYWHERE
    found = domains_here()
    if place == "spread" and len(found) < 2:
        raise UserError(
            "domains=spread needs two memory domains or more, and this machine has one; use domains=one, or the "
            "simulator's model of it: --sim domains=2"
        )
    used = [max(found, key=len)] if place == "one" else found
    for i, cores in enumerate(used):
        if (ranks := len(range(i, size, len(used)))) > len(cores):
            raise UserError(
                f"domains={place}: {ranks} workers would share the {len(cores)} cores of one memory domain; use fewer"
            )
    return Placement(used)


def domains_here() -> list[frozenset[int]]:
    """The cores of each domain that this process may use; where nobody tells of domains, all are one."""
    found = []
    for path in sorted(NODES.glob("node[0-9]*"), key=lambda path: int(path.name.removeprefix("node"))):
        with suppress(OSError):
            if cores := _listed((path / "cpulist").read_text()) & allowed_cores():
                found.append(cores)
    return found or [allowed_cores()]


def _listed(text: str) -> frozenset[int]:
    """`0-3,8` as numbers."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return frozenset(core for low, _, high in ranges for core in range(int(low), int(high or low) + 1))
