"""A call that is recorded gives what it gave as it was, to the bit; what cannot be recorded is called as it is."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from test_batched import MODELS, dropout, points
from torch import Tensor, nn

import hocket
from hocket.core.errors import UserError
from hocket.core.shard import Shards
from hocket.drivers.batched import Pending, Rows
from hocket.drivers.recorded import CHECKED_EVERY, Recorded

WORKERS, BATCH = 5, 4


seen: list[int] = []
"""What one of the functions below keeps."""


def counts(x: Tensor) -> Tensor:
    """Gives something else at each call."""
    seen.append(1)
    return x * len(seen)


class Counted:
    """Counts how often a function is really called."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        self.call, self.calls = call, 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.call(x)


def rows_of(model: Callable[[], nn.Module], data: tuple[Tensor, Tensor]) -> Rows:
    task = hocket.Task(model=model, data=(data, data), batch=BATCH)
    rows = Rows(task, task.load()[0], WORKERS)
    for row in range(WORKERS):
        rows.replica(row, task.build_model(row).train(), torch.device("cpu"))
    return rows


@pytest.mark.parametrize("name", [*MODELS, "dropout"])
def test_gradients_are_those_of_the_call_itself(name: str) -> None:
    model, made = MODELS.get(name, (dropout, points))
    rows = rows_of(model, made(10 * WORKERS * BATCH))
    for step in range(6):
        index = torch.arange(WORKERS * BATCH) + WORKERS * BATCH * step
        rows._matrices["block"].add_(0.01)  # other parameters than those that were recorded
        found = []
        for way in (range(WORKERS), list(range(WORKERS))):  # a list is never recorded
            torch.manual_seed(step)
            losses = rows.gradients(way, index)
            found.append((losses, rows._matrices["gradient"].clone(), torch.rand(1)))
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)
    (recorded,) = rows._repeated.values()
    assert isinstance(recorded, Recorded)
    assert recorded._replay is not None


def test_a_recording_takes_the_place_of_the_call() -> None:
    written = torch.zeros(3)

    def call(x: Tensor) -> Tensor:
        written.copy_(x.exp())
        return (x * weights).relu().sum().detach()

    weights = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    counted = Counted(call)
    recorded = Recorded(counted, written)
    for step in range(10):
        x = torch.arange(3.0) + step
        assert float(recorded(x)) == float(call(x))
        assert torch.equal(written, x.exp())
        with torch.no_grad():
            weights.add_(0.5)  # in place: the next call reads it
    assert counted.calls == 2  # the first, and one to compare


def test_what_is_not_a_number_is_the_same_as_itself() -> None:
    recorded = Recorded(counted := Counted(lambda x: x.log().sum()), torch.tensor([math.nan]))
    assert all(math.isnan(recorded(torch.tensor([-1.0]))) for _ in range(CHECKED_EVERY))
    assert counted.calls == 3


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x * float(x.sum()),  # looks at a value
        lambda x: x[x > 1].sum(),  # has as many elements as the values say
        lambda x: x + torch.from_numpy(x.numpy() * 2),  # is computed elsewhere
        counts,
    ],
    ids=["value", "shape", "elsewhere", "state"],
)
def test_what_cannot_be_recorded_is_called_as_it_is(call: Callable[[Tensor], Tensor]) -> None:
    seen.clear()
    recorded = Recorded(counted := Counted(call), torch.zeros(1))
    for step in range(5):
        x = torch.arange(3.0) + step
        found = recorded(x)
        assert torch.equal(found, x * (step + 1) if seen else call(x))
    assert counted.calls == 5


def test_a_change_in_the_middle_of_a_run_is_noticed() -> None:
    factor = 1.0
    recorded = Recorded(lambda x: x * factor, torch.zeros(1))
    for _ in range(10):
        recorded(torch.ones(2))
    factor = 2.0
    with pytest.raises(
        UserError, match="something else than it did a few steps ago; use --engine sim --sim batched=off"
    ):
        for _ in range(CHECKED_EVERY):
            recorded(torch.ones(2))


def test_what_changed_by_being_looked_at_is_recorded_anew() -> None:
    factor, written = 1.0, torch.zeros(2)

    def call(x: Tensor) -> Tensor:
        written.copy_(x + torch.rand(2))
        return x * factor

    recorded = Recorded(counted := Counted(call), written)
    for _ in range(3):
        recorded(torch.ones(2))
    before, generator = written.clone(), torch.get_rng_state()
    for value in (1.0, 2.0):
        factor = value
        recorded.confirm()
        assert torch.equal(written, before)
        assert torch.equal(torch.get_rng_state(), generator)
    calls = counted.calls
    for _ in range(CHECKED_EVERY - 1):
        assert recorded(torch.ones(2)).tolist() == [2, 2]
    assert counted.calls == calls + 2  # recorded anew, and compared


class Eager(nn.Module):
    """A loss that counts how often it was asked in evaluation, and grows with that."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.looks += not torch.is_grad_enabled()
        return nn.functional.cross_entropy(output, target) * (1 + 0.01 * self.looks)


@pytest.mark.parametrize("strategy", ["allreduce", "local-sgd:every=3"])
def test_a_loss_that_remembers_evaluations_trains_as_one_by_one(strategy: str) -> None:
    data = points(120)
    found = []
    for batched in ("on", "off"):
        task = hocket.Task(model=MODELS["mlp"][0], data=(data, data), loss=Eager(), batch=BATCH, epochs=20)
        run = hocket.fit(task, strategy=strategy, engine="sim", workers=10, sim={"batched": batched}, progress=False)
        found.append(run.state)
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-3, atol=1e-4)


class Counting(nn.Module):
    """Has a statistic that changes at each call, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(5, 3)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        mean: Tensor = self.mean
        mean.mul_(0.9).add_(x.detach().mean(0))
        found: Tensor = self.last(nn.functional.dropout(x - mean))
        return found


def test_a_rehearsal_leaves_nothing_behind() -> None:
    pending = Pending(rows_of(Counting, points(66)))
    before, generator = pending.rows._matrices["block"].clone(), torch.get_rng_state()
    pending.rehearse(Shards(66, WORKERS, BATCH, 0))  # 3 steps, and one of 2 samples for the first and 1 for the others
    assert torch.equal(pending.rows._matrices["block"], before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert not pending._losses
    assert all(call._replay is not None for call in pending.rows._repeated.values() if isinstance(call, Recorded))
    assert set(pending.rows._repeated) == {(range(WORKERS), 20), (range(1), 2), (range(1, WORKERS), 4)}
