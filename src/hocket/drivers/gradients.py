"""Where gradients come from. A session does not care: a whole model by autograd here, parts of one elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from hocket.core.errors import UserError, shown
from hocket.core.replica import Part, Replica
from hocket.core.spans import Spans, unseen
from hocket.layouts.portion import AllOfIt, Portion
from hocket.measure.losses import Loss
from hocket.tasks import SampleSet, Task

Ready = Callable[[Part], None]
"""Called with each part of the gradient, in the order of `replica.parts`, as soon as it is complete."""

EVALUATED = 2048
"""Samples that are evaluated at a time."""


class Gradients(Protocol):
    """Finds the gradient of a replica. A gradient stays as it is until the next one is asked for."""

    replica: Replica
    portion: Portion
    """What the replica is of the model."""
    work: float
    """Share of a whole model's computing that this rank does: what a virtual clock charges after a gradient."""
    train: Source
    spans: Spans
    """Told of forward and backward, for a timeline."""

    def compute(self, index: Tensor, ready: Ready | None) -> Loss | None:
        """Put the gradient on these training samples into `replica.g`; returns the loss, None where there are none."""

    def evaluate(self, samples: SampleSet, index: Tensor) -> Tensor:
        """Sums of the loss and of each metric over these samples."""

    def evaluate_whole(self, samples: SampleSet) -> dict[str, float]:
        """What is no mean over samples, by name."""

    def evaluated(self) -> None:
        """All workers are done with that, and training goes on."""

    def measured(self) -> dict[str, Any]:
        """What the record shall tell of it."""


class Source(Protocol):
    """Where the samples of a batch come from."""

    def take(self, index: Tensor) -> tuple[Any, Any]: ...


def casting(device: torch.device, wanted: bool) -> AbstractContextManager[None]:
    """Inside, a model computes in bfloat16 if that is wanted."""
    return torch.autocast(device.type, torch.bfloat16) if wanted else nullcontext()


class WholeModel:
    """The whole model in one process, its gradient by autograd."""

    work = 1.0

    def __init__(self, task: Task, replica: Replica, train: Source, *, piece: int = 0, autocast: bool = False) -> None:
        """A batch is computed `piece` samples at a time, 0 is all at once; `autocast` is to bfloat16."""
        self.replica = replica
        self.portion: Portion = AllOfIt(replica)
        self.train = train
        self.spans: Spans = unseen
        self._task, self._piece, self._autocast = task, piece, autocast
        self._module, self._device = replica.model, replica.x.device
        self._module.train()

    def _cast(self) -> AbstractContextManager[None]:
        return casting(self._device, self._autocast)

    def compute(self, index: Tensor, ready: Ready | None = None) -> Loss | None:
        self.replica.zero_grad()
        samples = index.numel()  # len() of a tensor takes a microsecond
        pieces = torch.split(index, self._piece) if 0 < self._piece < samples else (index,)
        total: Tensor | None = None
        for number, piece in enumerate(pieces, 1):
            with self.spans("forward"):
                loss = self._loss(piece, piece.numel() / samples) if samples else None
            announced = self._announced(ready) if ready is not None and number == len(pieces) else nullcontext()
            with self.spans("backward"), announced:
                if loss is not None:
                    torch.autograd.backward(loss)
            if loss is not None:
                total = loss.detach() if total is None else total + loss.detach()
        self.replica.collect_odd()
        return total

    def _loss(self, index: Tensor, part: float) -> Tensor:
        """The loss on these samples, as much as they are of a batch."""
        inputs, targets = self.train.take(index)
        with self._cast():
            loss = self._task.loss(self._module(inputs.to(self._device)), targets.to(self._device))
        return loss if part == 1 else loss * part

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
                if number < announced:
                    raise UserError(
                        "backward came twice to a parameter whose gradient had left; use overlap=off, or "
                        "torch.utils.checkpoint with use_reentrant=False"
                    )
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
        measures = list(self._task.measures.values())
        sums = torch.zeros(1 + len(measures), dtype=torch.float64)
        if not index.numel():
            return sums
        self._module.eval()
        with torch.no_grad(), self._cast():
            for chosen in torch.split(index, EVALUATED):
                inputs, targets = samples.take(chosen)
                output, targets = self._module(inputs.to(self._device)), targets.to(self._device)
                for at, measure in enumerate([self._task.loss, *measures]):
                    sums[at] += float(measure(output, targets)) * len(chosen)
        self._module.train()
        return sums

    def evaluate_whole(self, samples: SampleSet) -> dict[str, float]:
        if self._task.evaluate is None:
            return {}
        self._module.eval()
        with torch.no_grad(), self._cast():
            found = checked_values(self._task, self._task.evaluate(self._module, samples.samples))
        self._module.train()
        return found

    def evaluated(self) -> None:
        pass

    def measured(self) -> dict[str, Any]:
        return {}


def checked_values(task: Task, found: Any) -> dict[str, float]:
    """What the user's `evaluate` gave; refuses what are no numbers by name."""
    try:
        values = {str(name): float(value) for name, value in found.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError):
        raise UserError(f"Task.evaluate must return numbers by name, such as a dict; it gave {shown(found)}") from None
    if "loss" in values or task.metric_name not in {**task.measures, **values}:
        names = ", ".join(values) or "none"
        raise UserError(
            f"Task.evaluate must give {task.metric_name!r} (Task.metric_name), and no 'loss'; it gave {names}"
        )
    return values
