"""In a loop of the user's own: telling a strategy of the parts of a gradient while backward goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from hocket.core.clock import Clock
from hocket.core.errors import UserError
from hocket.core.replica import Replica
from hocket.core.weight import Weight
from hocket.core.worker import Worker

_OFF = "or use overlap=off"


class Early:
    """Hears of every gradient that backward completes, and announces the parts in their order.

    What has been announced has left: nobody may change it between backward and the step.
    """

    def __init__(self, worker: Worker, clock: Clock, weigh: Callable[[], Weight]) -> None:
        self._worker, self._clock, self._weigh = worker, clock, weigh
        self._replica: Replica = worker.model
        self._complete = [False] * len(self._replica.parts)
        self._announced, self._version = 0, -1
        self._held = False
        watched: list[Any] = list(reversed(self._replica.parameters))
        self._handles = [p.register_post_accumulate_grad_hook(self._hook(i)) for i, p in enumerate(watched)]

    def _hook(self, number: int) -> Callable[[Tensor], None]:
        at = len(self._complete) - 1 - number

        def completed(_: Tensor) -> None:
            if self._held:
                return
            if self._complete[number]:
                raise UserError(
                    "a second gradient came before optimizer.step(), and the first is on its way; compute all but the "
                    f"last inside 'with team.no_sync():', {_OFF}"
                )
            self._replica.collect_one(at)
            if not any(self._complete):
                self._worker.coming.weight = self._weigh()
            self._complete[number] = True
            self._version = self._replica.g._version
            self._announce()

        return completed

    def _announce(self, *, rest: bool = False) -> None:
        parts = self._replica.parts
        while self._announced < len(parts) and (self._complete[self._announced] or rest):
            part = parts[self._announced]
            self._announced += 1
            self._clock.charge(1.0, part.done)
            assert self._worker.on_part is not None
            self._worker.on_part(part)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, gradients are only added up."""
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before

    def finish(self) -> None:
        """The step has come: announce what backward did not touch."""
        weight = self._weigh()
        if not any(self._complete):
            self._worker.coming.weight = weight
        elif weight != self._worker.coming.weight:
            raise UserError(f"team.saw came after backward, which had sent its weight; call it before, {_OFF}")
        elif self._replica.g._version != self._version or self._replaced():
            raise UserError(
                "the gradients were changed between backward and optimizer.step(), and have left already; clip them "
                f"with team.clip_grad_norm_, {_OFF}"
            )
        self._replica.collect()
        self._announce(rest=True)
        self._complete, self._announced = [False] * len(self._complete), 0

    def _replaced(self) -> bool:
        """Whether somebody has put another tensor where a gradient was."""
        found = zip(self._replica.parameters, self._replica.grads, reversed(self._complete), strict=True)
        return any(p.grad is not grad for p, grad, complete in found if complete and p.dtype == grad.dtype)

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
