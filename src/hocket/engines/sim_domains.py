"""Memory domains in virtual time: where the blocks of a shared vector lie, and what it takes to get at them."""

from __future__ import annotations

import math

from hocket.core.errors import UserError
from hocket.core.units import bytes_per_second

MOST = 2**40
"""Of domains, and of what a far block takes: more is a mistake."""


class Domains:
    """Blocks lie in turn in the domains, and workers sit in turn in them.

    Each domain has a controller, which serves one access after the other in the order of asking. A worker takes longer
    for what is in another domain than its own; the controller there does not.
    """

    def __init__(self, count: int, far: float, share: float) -> None:
        """A controller is busy for a `share` of the time that one worker takes for what is near."""
        self.count, self._far, self._share = count, far, share
        self.free_s: dict[int, float] = {}
        """From when on each controller has nothing to do."""

    def serve(self, worker: int, domain: int, near_s: float, now_s: float) -> tuple[float, float]:
        """How long a worker waits for its turn, and how long it then takes; `near_s` is that with all near and idle."""
        begins_s = max(now_s, self.free_s.get(domain, 0.0))
        busy_s = near_s * self._share
        self.free_s[domain] = begins_s + busy_s
        own_s = near_s if worker % self.count == domain else near_s * self._far
        return begins_s - now_s, max(own_s, busy_s)


def domains_of(count: int, memory: str, controller: str, far: float) -> Domains | None:
    """What the simulator's options say; none where memory is as near as it is idle for all."""
    if not 0 <= count < MOST:
        raise UserError(f"sim: domains must be 0 or more, and less than 2**40; got {count}")
    if not (math.isfinite(far) and 1 <= far < MOST):
        raise UserError(f"sim: far must be 1 or more times as long, and less than 2**40; got {far:g}")
    share = bytes_per_second(memory, "memory") / bytes_per_second(controller, "controller")
    return Domains(count, far, share) if count else None
