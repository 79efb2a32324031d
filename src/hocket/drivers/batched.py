"""Gradients of many workers in one call: for ranks that take turns in one process, as in the simulator.

A gradient is fixed from the moment it is asked for. So a worker that needs its own lets all others come that are
earlier in virtual time, which ask for theirs, and then computes all that are pending.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from hocket.core.comm import Turns
from hocket.core.errors import UserError
from hocket.core.memory_use import keep_freed_memory
from hocket.core.replica import Memory, Replica
from hocket.core.seeds import generators_as_they_were
from hocket.core.shard import Shards
from hocket.drivers.captured import Call, captured
from hocket.drivers.gradients import Ready, WholeModel
from hocket.drivers.recorded import Recorded
from hocket.kernels.models.perceptron import is_cross_entropy
from hocket.measure.losses import Loss
from hocket.tasks import SampleSet, Task

ALIGNED = 16
"""Rows begin at multiples of so many elements, as vector instructions like it."""
IGNORED = -100
"""As a target: this one does not count in a cross-entropy."""
FEW_CLASSES = 16
"""With fewer, PyTorch's softmax on the CPU goes from one to the next: classes had better not lie side by side."""
REHEARSALS = 2
"""Calls before the clock starts: the first is recorded, the second compared with that."""
AT_ONCE, CACHED = 128, 2**20
"""Replicas in one call on the CPU, and parameters of all of them: of more, what is computed leaves the caches."""


class Rows:
    """Replicas as rows of one matrix, and the gradients of many of them at once."""

    def __init__(self, task: Task, train: SampleSet, count: int, *, in_step: bool = True) -> None:
        """`in_step`: all ask for their gradients together, again and again."""
        self._task, self._train, self.count, self._in_step = task, train, count, in_step
        self._matrices: dict[str, Tensor] = {}
        self._repeated: dict[tuple[range, int], Call] = {}
        """By the replicas and their samples: one for all of them in most steps, one or two for an epoch's last."""
        self._batches_the_loss = is_cross_entropy(task.loss)
        self._call = torch.vmap(self._one, randomness="different")

    def replica(self, row: int, model: nn.Module, device: torch.device) -> Replica:
        """The replica of this number. All have the layout of the first."""
        made = Replica(model, device, self._memory(row))
        if row == 0:
            if made.x.device.type == "cpu":
                keep_freed_memory()
            self._first, self._model, self._layout = made, made.model, made.layout(made.x)
            # What comes from a dataset comes anew each time
            self._repeats = self._in_step and isinstance(self._train.samples, tuple)
            self._statistics = {name: b for name, b in made.model.named_buffers() if b.dtype == made.x.dtype}
            self._slots = list(_slots(made.model, {*self._layout, *self._statistics}))
        return made

    def _memory(self, row: int) -> Memory:

        def give(purpose: str, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
            if purpose not in self._matrices:
                wide = -(-length // ALIGNED) * ALIGNED
                self._matrices[purpose] = torch.zeros(self.count, wide, dtype=dtype, device=device)
            return self._matrices[purpose][row, :length]

        return give

    def _one(self, tensors: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of one replica, or what its model gives, where the losses of all are found together."""
        # What torch.func.functional_call does, in a tenth of the time
        own = [place[key] for place, key, _ in self._slots]
        for place, key, name in self._slots:
            place[key] = tensors[name]
        try:
            found = self._model(inputs)
            if any(place[key] is not tensors[name] for place, key, name in self._slots):
                raise UserError("the model puts a new tensor in the place of a buffer or parameter")
            return found if self._batches_the_loss else self._task.loss(found, targets)
        finally:
            for (place, key, _), tensor in zip(self._slots, own, strict=True):
                place[key] = tensor

    def stack(self) -> Stack:
        """All replicas as one."""
        return Stack(self._first, self._matrices["block"], self._matrices["gradient"])

    def at_once(self) -> int:
        """How many replicas a call had best take."""
        x = self._first.x
        return max(min(AT_ONCE, CACHED // x.numel()), 1) if x.device.type == "cpu" else self.count

    def gradients(self, rows: Sequence[int], index: Tensor) -> Tensor:
        """Put the gradients of these replicas into theirs; returns their losses.

        Each is on samples of its own, all on equally many: `index` has those of one behind those of the other. A range
        of replicas is taken to come again, with as many samples; a list is whoever happens to wait.
        """
        if not isinstance(rows, range) or not self._repeats:
            return self._gradients(rows, index)
        again = rows, index.numel()
        if again not in self._repeated:
            self._repeated[again] = self._repeatable(rows, index)
        return self._repeated[again](index)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Inside, calls leave nothing behind: no statistics, and no random number is drawn."""
        block = self._matrices["block"]
        before = block.clone() if self._statistics else block
        with generators_as_they_were():
            yield
        block.copy_(before)

    def confirm(self) -> None:
        """A model or a loss may keep something of being evaluated: see whether what was recorded still holds."""
        for call in self._repeated.values():
            if isinstance(call, Recorded):
                call.confirm()

    def _repeatable(self, rows: range, index: Tensor) -> Call:
        call, device = partial(self._gradients, rows), self._first.x.device
        if device.type == "cpu":
            changed = ("gradient", "block") if self._statistics else ("gradient",)
            return Recorded(call, *(self._matrices[name][rows.start : rows.stop] for name in changed))
        return captured(call, index.to(device))

    def _gradients(self, rows: Sequence[int], index: Tensor) -> Tensor:
        first, count = rows[0], len(rows)
        inputs, targets = self._train.take(index)
        block, gradient = self._matrices["block"], self._matrices["gradient"]
        inputs, targets = (t.to(block.device).unflatten(0, (count, -1)) for t in (inputs, targets))
        in_a_row = rows[-1] - first + 1 == count
        if in_a_row:
            block, gradient = block[first : first + count], gradient[first : first + count]
        else:
            chosen = torch.tensor(rows, device=block.device)
            whole, block, gradient = gradient, block[chosen], gradient.new_empty(count, gradient.shape[1])
        parameters = {name: _stacked(block, place).requires_grad_() for name, place in self._layout.items()}
        statistics = {name: _stacked(block, place) for name, place in self._statistics.items()}
        with _attention_in_steps(block.device):
            losses: Tensor = self._call(parameters | statistics, inputs, targets)
        if self._batches_the_loss:
            losses = _cross_entropies(losses, targets)
        # No replica's loss depends on another's parameters: the gradient of the sum is that of each.
        found = torch.autograd.grad(losses.sum(), list(parameters.values()), materialize_grads=True)
        for place, part in zip(self._layout.values(), found, strict=True):
            _stacked(gradient, place).copy_(part)
        if not in_a_row:
            whole[chosen] = gradient
        return losses.detach()


def _attention_in_steps(device: torch.device) -> AbstractContextManager[None]:
    """Inside, attention is made of operations that have a batched form. The one kernel for it on the CPU has none."""
    return sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" else nullcontext()


def _cross_entropies(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of each replica, in one call: PyTorch has no batched form of it, and takes it apart in Python."""
    count, flat, chosen = len(outputs), outputs.flatten(0, 1), targets.flatten(0, 1)
    if flat.dim() == 2 and chosen.dim() == 1 and flat.shape[1] < FEW_CLASSES and flat.device.type == "cpu":
        flat, chosen = flat.t().contiguous()[None], chosen[None]
    each = F.cross_entropy(flat, chosen, reduction="none").view(count, -1)
    if targets.is_floating_point():  # how likely each class is, not which it is
        return each.mean(1)
    return each.sum(1) / (targets != IGNORED).view(count, -1).sum(1)


def _slots(model: nn.Module, names: set[str]) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Where modules hold the tensors of these names; one that several modules share has several places."""
    named: dict[int, str] = {id(t): n for n, t in (*model.named_parameters(), *model.named_buffers()) if n in names}
    for module in model.modules():
        for place in (module._parameters, module._buffers):
            for key, tensor in place.items():
                if id(tensor) in named:
                    yield place, key, named[id(tensor)]


def _stacked(matrix: Tensor, place: Tensor) -> Tensor:
    """What lies in every row of the matrix where `place` lies in its own."""
    at = place.storage_offset() % matrix.stride(0)
    size, stride = (len(matrix), *place.shape), (matrix.stride(0), *place.stride())
    return matrix.detach().as_strided(size, stride, matrix.storage_offset() + at)


class Stack(Replica):
    """All replicas of a matrix as one: what is a vector in one is a matrix here, with a row for each."""

    def __init__(self, first: Replica, block: Tensor, gradient: Tensor) -> None:
        n, m = first.x.numel(), first.buffers.numel()
        self.values, self.x, self.buffers = block[:, : n + m], block[:, :n], block[:, n : n + m]
        self.g, self.count, self.gradient_count = gradient[:, :n], block[:, n + m], gradient[:, n]
        self.odd_buffers, self._odd, self.parameters = [], [], first.parameters
        self.values.copy_(first.values.clone())  # everyone sets out from the first

    def layout(self, flat: Tensor) -> dict[str, Tensor]:
        raise UserError("a strategy that looks at layers does not run on all replicas at once")


class Pending:
    """The gradients that the workers of one process wait for."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self._asked: dict[int, Tensor] = {}
        self._losses: dict[int, Loss] = {}

    def ask(self, row: int, index: Tensor) -> None:
        self._asked[row] = index

    def take(self, row: int) -> Loss:
        """The loss of a gradient that was asked for, and is now where it belongs."""
        if row in self._asked:
            self._compute()
        return self._losses.pop(row)

    def rehearse(self, shards: Shards) -> None:
        """Before the clock starts: what the first calls take longer for, as what is recorded."""
        with self.rows.rehearsing():
            for step in [*{0, shards.steps - 1}] * REHEARSALS:
                for row in range(self.rows.count):
                    index = shards.batch(0, step, row)
                    if index.numel():
                        self.ask(row, index)
                self._compute()
        self._losses.clear()

    def _compute(self) -> None:
        is_everyone = len(self._asked) == self.rows.count
        by_length = defaultdict(list)
        for row in sorted(self._asked):
            by_length[self._asked[row].numel()].append(row)
        at_once = self.rows.at_once()
        for rows in by_length.values():
            portion = -(-len(rows) // -(-len(rows) // at_once))
            for at in range(0, len(rows), portion):
                some: Sequence[int] = rows[at : at + portion]
                if is_everyone and some[-1] - some[0] + 1 == len(some):  # as in most steps
                    some = range(some[0], some[-1] + 1)
                found = self.rows.gradients(some, torch.cat([self._asked[row] for row in some]))
                on_the_device = found.device.type != "cpu"
                self._losses.update(zip(some, found.unbind() if on_the_device else found.tolist(), strict=True))
        self._asked.clear()


class BatchedModel(WholeModel):
    """One worker's part in that."""

    def __init__(
        self,
        task: Task,
        train: SampleSet,
        workers: int,
        row: int,
        model: nn.Module,
        device: torch.device,
        turns: Turns,
        *,
        in_step: bool,
    ) -> None:
        self._pending = turns.common(lambda: Pending(Rows(task, train, workers, in_step=in_step)))
        super().__init__(task, self._pending.rows.replica(row, model, device), train)
        self._row, self._turns = row, turns

    def rehearse(self, shards: Shards) -> None:
        """For workers that go in step, when all are there; the others wait for the first."""
        if self._row == 0:
            self._pending.rehearse(shards)

    def evaluated(self) -> None:
        if self._row == 0:
            self._pending.rows.confirm()

    def compute(self, index: Tensor, ready: Ready | None = None) -> Loss | None:
        loss: Loss | None = None
        if index.numel():
            self._pending.ask(self._row, index)
            self._turns.let_earlier_run()
            loss = self._pending.take(self._row)
        else:
            self.replica.zero_grad()
        return loss
