"""What a parameter server gives its workers to compute gradients at: the parameters, or where they should soon be."""

from __future__ import annotations

from torch import Tensor

from hocket.core.staleness import LookedAhead, looked_ahead
from hocket.core.state import State


class Views(State):
    """The parameters as each worker was given them, which is where its gradients are computed."""

    newest: dict[int, Tensor]
    oldest: dict[int, Tensor]
    """Of a worker that has read again before it pushed: where the oldest gradient that it holds was computed."""
    before: dict[int, Tensor]
    """What a worker had before the newest: there it computes while that is on its way."""
    true: dict[int, Tensor]
    """What the parameters really were when a worker read them last: vectors of their own, changed in place. Where
    nobody looks ahead there are none."""

    def __init__(
        self, ahead: float, x: Tensor, workers: int, pipeline: int = 0, looked_ahead: LookedAhead = looked_ahead
    ) -> None:
        everyone = dict.fromkeys(range(workers), x.clone())
        true = {i: x.clone() for i in range(workers)} if ahead else {}
        super().__init__(newest=everyone, oldest={}, before=dict(everyone) if pipeline else {}, true=true)
        self._ahead, self._pipeline, self._looked_ahead = ahead, pipeline, looked_ahead

    def given(self, worker: int, x: Tensor) -> Tensor:
        """What a worker shall compute its next gradient at: where the parameters should be when that arrives.

        Of their movement since its last read, as much is expected to go on as the momentum of all carries.
        """
        if self._pipeline:
            self.before[worker] = self.newest[worker]
        self.newest[worker] = self._looked_ahead(x, self.true[worker], self._ahead) if self._ahead else x.clone()
        return self.newest[worker]

    def held(self, worker: int) -> None:
        """A worker reads while it holds gradients that it has not pushed."""
        self.oldest.setdefault(worker, self.newest[worker])

    def pushed(self, worker: int) -> Tensor:
        """A worker pushes: where the oldest of its gradients was computed."""
        return self.before[worker] if self._pipeline else self.oldest.pop(worker, self.newest[worker])
