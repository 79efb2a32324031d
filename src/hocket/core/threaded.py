"""Strategies whose workers may each be several threads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from hocket.core.sharing import Sharing
from hocket.core.weight import Weight
from hocket.core.worker import Strategy, Worker


class Threaded(Strategy):
    """A strategy whose workers may train their replicas in compiled threads, and hear of it some steps later."""

    every: int
    """Steps that the threads take before they hear of it, at most."""
    hogwild: int
    """Compiled threads of each worker, which write its replica without locks; 0 is none."""
    hot: float
    """The share of a model's rows, those that change most, that `took` is told of."""

    @property
    def threads_inside(self) -> int:
        return self.hogwild

    def compiled_sharing(
        self, dim: int, workers: int, *, sparse: bool = False, by_rows: bool = False
    ) -> Sharing | None:
        return Sharing("hogwild", dim, self.hogwild) if self.hogwild else None

    @abstractmethod
    def took(self, w: Worker, weight: Weight, hot: Sequence[slice]) -> None:
        """The threads took steps on samples of this weight; `w.step` is the last one. `hot` is where those rows lie."""
