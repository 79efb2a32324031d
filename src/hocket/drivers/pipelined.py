"""A model whose layers are on successive ranks, its gradient by micro-batches that follow each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from hocket.core.clock import FORWARD, Clock
from hocket.core.comm import Request
from hocket.core.message import Message
from hocket.core.spans import Spans, unseen
from hocket.drivers.gradients import EVALUATED, Ready, Source, casting
from hocket.drivers.plan import Plan
from hocket.layouts.exchange import given
from hocket.layouts.microbatches import actions, pieces
from hocket.layouts.placing import Placed
from hocket.layouts.portion import Portion
from hocket.measure.sometimes import Sometimes
from hocket.tasks import SampleSet, Task

_TAG, _LOSS = 7004, 7005  # the loss takes no time, and may overtake the rest
THERE, BACK = FORWARD, 1 - FORWARD
"""What the two ways cost, for a virtual clock."""


class Pipelined:
    """One stage of it. The gradient of a batch is the mean over its micro-batches, weighted by their samples."""

    work = 0.0
    """It charges the clock itself, micro-batch by micro-batch."""

    def __init__(
        self, plan: Plan, task: Task, placed: Placed, train: SampleSet, comm: Sometimes, within: Sometimes,
        clock: Clock, least: int,
    ) -> None:  # fmt: skip
        """`least` is how many samples a micro-batch must have."""
        self.replica = placed.replica
        self.portion: Portion = placed.portion
        self.train: Source = train
        self._task, self._layout, self._batch, self._autocast = task, plan.made_layout, plan.batch, plan.autocasts
        self._comm, self._within, self._clock = comm, within, clock
        self._module, self._device = self.replica.model, self.replica.x.device
        self._stage, self._last, self._least = comm.rank, comm.size - 1, least
        self.spans: Spans = unseen
        self.in_flight = 0
        """Micro-batches that were on their way at once in this stage, at the most."""
        self._busy_s = self._steps_s = 0.0
        self._module.train()

    def measured(self) -> dict[str, Any]:
        """Of this stage: the share of its steps in which it did not compute, and what was in flight at the most."""
        bubble = 1 - self._busy_s / self._steps_s if self._steps_s else 0.0
        return {"pipeline": {"bubble": bubble, "in_flight": self.in_flight}}

    def _cast(self) -> AbstractContextManager[None]:
        return casting(self._device, self._autocast)

    def compute(self, index: Tensor, ready: Ready | None) -> Tensor | None:
        self.replica.zero_grad()
        loss = self._step(index) if len(index) else None
        self.replica.collect_odd()
        if ready is not None:
            for part in self.replica.parts:
                ready(part)
        return loss

    def _step(self, index: Tensor) -> Tensor:
        layout, began = self._layout, self._clock.now()
        count = pieces(layout.schedule, layout.pipeline, layout.microbatches, len(index), self._least)
        parts = index.tensor_split(count)
        flying: dict[int, tuple[Tensor, Tensor]] = {}
        sent: list[Request] = []
        loss = torch.zeros((), device=self._device)
        for way, i in actions(layout.schedule, self._stage, layout.pipeline, len(parts)):
            part = parts[i]
            share = len(part) / self._batch / layout.ranks
            if way == "there":
                x = self.train.take(part)[0].to(self._device) if self._stage == 0 else self._received(-1)
                with self.spans("forward"), self._busy(THERE * share), self._cast():
                    y = self._module(given(x))
                    if self._stage == self._last:
                        y = self._loss(y, part) * (len(part) / len(index))
                        loss += y.detach()
                if self._stage < self._last:
                    sent.append(self._send(1, y))
                flying[i] = x, y
                self.in_flight = max(self.in_flight, len(flying))
            else:
                x, y = flying.pop(i)
                if y.requires_grad:
                    g = None if self._stage == self._last else self._received(1)
                    with self.spans("backward"), self._busy(BACK * share):
                        torch.autograd.backward(y, g)
                if self._stage and x.grad is not None:
                    sent.append(self._send(-1, x.grad))
        for request in sent:
            request.wait()
        self._steps_s += self._clock.now() - began
        return self._told(loss)

    @contextmanager
    def _busy(self, share: float) -> Iterator[None]:
        began = self._clock.now()
        yield
        self._clock.charge(share)
        self._busy_s += self._clock.now() - began

    def _loss(self, output: Tensor, index: Tensor) -> Tensor:
        return self._task.loss(output, self.train.take(index)[1].to(self._device))

    def _told(self, loss: Tensor) -> Tensor:
        """The loss of the last stage, to all: for the record, so it neither counts nor takes time."""
        with self._clock.free(), self._comm.uncounted():
            if self._stage == self._last:
                for other in range(self._last):
                    self._comm.isend(other, Message("loss", (), (loss,)), _LOSS).wait()
                return loss
            return self._comm.recv(self._last, _LOSS)[1].tensors[0].clone()

    def _send(self, direction: int, x: Tensor) -> Request:
        """To a neighbour, who hears too whether a gradient of it is needed."""
        return self._comm.isend(self._stage + direction, Message("x", (int(x.requires_grad),), (x.detach(),)), _TAG)

    def _received(self, direction: int) -> Tensor:
        msg = self._comm.recv(self._stage + direction, _TAG)[1]
        return msg.tensors[0].requires_grad_(bool(msg.ints[0]))

    def evaluate(self, samples: SampleSet, index: Tensor) -> Tensor:
        sums = torch.zeros(1 + len(self._task.measures), dtype=torch.float64)
        self._module.eval()
        with torch.no_grad(), self._comm.uncounted(), self._within.uncounted(), self._cast():
            for chosen in torch.split(index, EVALUATED):
                if len(chosen):
                    self._look(samples, chosen, sums)
            self._comm.broadcast(sums, self._last)
        self._module.train()
        return sums

    def _look(self, samples: SampleSet, chosen: Tensor, sums: Tensor) -> None:
        """One batch through all stages; the last one adds to the sums."""
        inputs, targets = samples.take(chosen)
        x = inputs.to(self._device) if self._stage == 0 else self._received(-1)
        y = self._module(x)
        if self._stage < self._last:
            self._send(1, y).wait()
            return
        targets = targets.to(self._device)
        for at, measure in enumerate([self._task.loss, *self._task.measures.values()]):
            sums[at] += float(measure(y, targets)) * len(chosen)

    def evaluated(self) -> None:
        pass

    def evaluate_whole(self, samples: SampleSet) -> dict[str, float]:
        """No rank has a model to call it with; a task that asks for it is refused before."""
        return {}
