"""What a rank is doing right now. Needs no PyTorch, so that a fresh process can report at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace


@dataclass
class Status:
    """Read by others for the progress display and for error messages."""

    step: int = 0
    samples: int = 0
    loss: float = float("nan")
    lr: float = float("nan")
    """The learning rate of the last step."""
    operation: str = "start"
    since: float = 0.0
    """When the operation began, on the rank's own clock."""

    stop: Callable[[], None] = field(default=lambda: None, repr=False)
    """Called once a step: raises `Aborted` when the run is being torn down."""
    uncounted: Callable[[], tuple[int, int, float]] | None = field(default=None, repr=False)
    """Steps and samples since those above, as far as it is known, and the rate now, while compiled code takes them."""

    def seen(self) -> Status:
        """As others shall see it."""
        uncounted = self.uncounted
        if uncounted is None:
            return self
        steps, samples, lr = uncounted()
        return replace(self, step=self.step + steps, samples=self.samples + samples, lr=lr)
