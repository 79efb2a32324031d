"""Where gradients come from. A session does not care: a whole model by autograd here, parts of one elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from hocket.core.replica import Part, Replica
from hocket.tasks import SampleSet, Task

Ready = Callable[[Part], None]
"""Called with each part of the gradient, in the order of `replica.parts`, as soon as it is complete."""

EVALUATED = 2048
"""Samples that are evaluated at a time."""


class Gradients(Protocol):
    """Finds the gradient of a replica. A gradient stays as it is until the next one is asked for."""

    replica: Replica

    def compute(self, index: Tensor, ready: Ready | None) -> Tensor | None:
        """Put the gradient on these training samples into `replica.g`; returns the loss, None where there are none."""

    def evaluate(self, samples: SampleSet, index: Tensor) -> Tensor:
        """Sums of loss and metric over these samples."""


class WholeModel:
    """The whole model in one process, its gradient by autograd."""

    def __init__(self, task: Task, replica: Replica, train: SampleSet) -> None:
        self.replica = replica
        self._task, self._train = task, train
        self._module, self._device = replica.model, replica.x.device
        self._module.train()

    def compute(self, index: Tensor, ready: Ready | None = None) -> Tensor | None:
        self.replica.zero_grad()
        loss: Tensor | None = None
        if len(index):
            inputs, targets = self._train.take(index)
            loss = self._task.loss(self._module(inputs.to(self._device)), targets.to(self._device))
        if ready is not None:
            with self._announced(ready):
                if loss is not None:
                    torch.autograd.backward(loss)
        elif loss is not None:
            torch.autograd.backward(loss)
        self.replica.collect_odd()
        return None if loss is None else loss.detach()

    @contextmanager
    def _announced(self, ready: Ready) -> Iterator[None]:
        """Inside, parts are announced as backward completes them; in the end those that it did not touch."""
        parts, parameters = self.replica.parts, list(reversed(self.replica.parameters))
        complete = [False] * len(parts)
        announced = 0

        def announce(*, rest: bool = False) -> None:
            nonlocal announced
            self.replica.collect_odd()
            while announced < len(parts) and (complete[announced] or rest):
                announced += 1
                ready(parts[announced - 1])

        def hook(number: int) -> Callable[[Tensor], None]:
            def completed(_: Tensor) -> None:
                complete[number] = True
                announce()

            return completed

        watched: list[Any] = parameters
        handles = [p.register_post_accumulate_grad_hook(hook(i)) for i, p in enumerate(watched)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        announce(rest=True)

    def evaluate(self, samples: SampleSet, index: Tensor) -> Tensor:
        sums = torch.zeros(2, dtype=torch.float64)
        self._module.eval()
        with torch.no_grad():
            for chosen in torch.split(index, EVALUATED):
                if len(chosen):
                    inputs, targets = samples.take(chosen)
                    output, targets = self._module(inputs.to(self._device)), targets.to(self._device)
                    sums[0] += float(self._task.loss(output, targets)) * len(chosen)
                    sums[1] += float(self._task.metric(output, targets)) * len(chosen)
        self._module.train()
        return sums
