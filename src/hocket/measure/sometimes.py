"""A communicator that is metered, but for what only measures the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hocket.core.comm import Comm
from hocket.core.forward import Forwarding


class Sometimes(Forwarding):
    """Counts what training sends, and not what is sent when somebody looks at the model."""

    def __init__(self, metered: Comm, bare: Comm) -> None:
        super().__init__(metered)
        self._bare = bare

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        metered, self.inner = self.inner, self._bare
        try:
            yield
        finally:
            self.inner = metered
