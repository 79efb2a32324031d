"""What a rank is doing right now. Needs no PyTorch, so that a fresh process can report at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Status:
    """Read by others for the progress display and for error messages."""

    step: int = 0
    samples: int = 0
    loss: float = float("nan")
    operation: str = "start"
    since: float = 0.0
    """When the operation began, on the rank's own clock."""

    stop: Callable[[], None] = field(default=lambda: None, repr=False)
    """Called once a step: raises `Aborted` when the run is being torn down."""
