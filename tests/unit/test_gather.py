"""Workers that gather several batches in a copy of their own: nothing is lost, and alone nothing changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from threading import Thread
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import tiny
import torch
from test_dense import a_problem
from test_sparse import parameters
from torch import nn
from torch.utils.data import TensorDataset

import hocket
from hocket.core.errors import UserError
from hocket.core.sharing import Method, Sharing
from hocket.core.staleness import Handling
from hocket.kernels.jit import kernel
from hocket.kernels.memory.gather import CompiledVector, Near, keep_up
from hocket.kernels.memory.locks import WRITING, drop, take
from hocket.kernels.memory.updates import next_batch
from hocket.kernels.memory.vector import MappedVector
from hocket.kernels.models.family import BROKEN_LOCK
from hocket.strategies import strategy
from hocket.strategies.shared_memory import Hogwild

METHODS = get_args(Method)
DIM = 300


def share(method: Any, workers: int, **options: Any) -> MappedVector:
    sharing = Sharing(method, DIM, workers, **options)
    return MappedVector.create(sharing, torch.zeros(DIM))


@kernel
def count_up(shared, near, dim, batches):
    """A worker whose batches add 1 to each parameter; how many it took."""
    made = 0
    while True:
        over = next_batch(shared.control) >= batches
        if not keep_up(shared, near, dim, made, over, 0.1):
            return -1
        if over:
            return made
        for i in range(dim):
            near.vector.rows[0, i] += 1
        made += 1


def count_together(vector: MappedVector, batches: int) -> list[int]:
    """How many batches each worker took."""
    made = [0] * vector.sharing.workers

    def run(w: int) -> None:
        shared = CompiledVector(vector.control, vector.rows, w)
        made[w] = count_up(shared, Near.copy(DIM), DIM, batches)

    threads = [Thread(target=run, args=(w,)) for w in range(len(made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


@pytest.mark.parametrize("every", [2, 7, 1_000_000])
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_no_batch_is_lost(method: str, workers: int, every: int) -> None:
    vector, batches = share(method, workers, every=every), 20_000
    made = count_together(vector, batches)
    assert min(made) >= 0 and sum(made) == batches
    statistics = vector.statistics()
    assert statistics.updates == vector.version == sum(-(-m // every) for m in made)
    assert statistics.dropped == 0
    values = parameters(vector)
    if method == "hogwild":
        assert 0 < values.max() <= batches
    else:
        assert np.all(values == batches)
        assert vector.references() == [0] * vector.sharing.slots


def test_an_update_that_is_dropped_takes_all_its_batches_along() -> None:
    vector = share("leashed", 4, every=5, persistence=0)
    count_together(vector, 20_000)
    statistics = vector.statistics()
    assert parameters(vector)[0] <= 5 * statistics.updates
    assert statistics.updates + statistics.dropped >= 20_000 / 5


@pytest.mark.parametrize("method", ["mutex", "rwlock"])
def test_a_lock_that_cannot_be_had_ends_the_worker(method: Any) -> None:
    model, kernel_, _ = a_problem([7, 5, 3])
    sharing = Sharing(method, kernel_.dim, 2, every=3, deadline_s=0.05)
    vector = MappedVector.create(sharing, model.x)
    assert take(vector.control, 1, WRITING)
    thread_end = []
    thread = Thread(
        target=lambda: thread_end.append(kernel_.worker(0, 2).run_epoch(vector, np.arange(kernel_.samples), 0.1))
    )
    thread.start()
    thread.join(120)  # which may compile first
    drop(vector.control)  # before its memory goes
    assert thread_end == [BROKEN_LOCK]
    assert vector.statistics().updates == 0


@pytest.mark.parametrize("driver", ["compiled", "python", "sim"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("every", [2, 5, 100])
def test_alone_it_is_serial(method: str, driver: str, every: int) -> None:
    made = tiny.task(26)
    if driver == "python":
        made = dataclasses.replace(made, model=lambda: nn.Sequential(tiny.model(), nn.Identity()))
    settings: dict[str, Any] = dict(workers=1, epochs=3, lr_decay=0.5, momentum=0.9)
    serial = tiny.fit(made, strategy="serial", **settings)
    for handling in get_args(Handling):
        strategy = f"{method}:every={every},stale={handling}"
        result = tiny.fit(made, strategy=strategy, engine="sim" if driver == "sim" else "threads", **settings)
        # 7 batches an epoch; compiled workers meet after each
        updates = 3 * -(-7 // every) if driver == "compiled" else -(-21 // every)
        assert result.staleness["histogram"] == {"0": updates}
        for name, tensor in serial.state.items():
            torch.testing.assert_close(result.state[name], tensor, msg=f"{handling}: {name}")


@pytest.mark.parametrize("handling", get_args(Handling))
@pytest.mark.parametrize("method", METHODS)
def test_both_drivers_temper_alike(method: Any, handling: Any) -> None:
    """A worker takes two batches of gradient 30 at a rate of 0.01, while another moves each parameter by 1."""
    lr, g = 0.01, torch.full((DIM,), 30.0)
    ends = []
    for compiled in (True, False):
        vector = share(method, 2, every=2, handling=handling)
        if compiled:
            near, shared = Near.copy(DIM), CompiledVector(vector.control, vector.rows, 0)
            assert keep_up(shared, near, DIM, 0, False, lr)
            near.vector.rows[0, :DIM] -= 2 * np.float32(lr) * g.numpy()
        else:
            vector.read(torch.empty(DIM))
        other = vector.seen_by(1)
        other.read(torch.empty(DIM))
        other.publish(torch.full((DIM,), -1.0), 1.0)
        if compiled:
            assert keep_up(shared, near, DIM, 2, True, lr)
        else:
            vector.publish(2 * g, lr)
        ends.append(parameters(vector))
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-4)
    assert ends[0][0] != 0


class Alone:
    """A worker that steps by its rate times 1, and notes what it publishes."""

    def __init__(self) -> None:
        self.x, self.lr, self.step = torch.zeros(3), 0.0, 0
        self.shared = self.comm = self
        self.noted: list[tuple[float, float]] = []

    def keep(self, name: str, value: Any) -> Any:
        return value

    def portion(self, g: Any) -> float:
        return 1.0

    def descend(self, g: Any) -> None:
        self.x -= self.lr

    def publish(self, g: torch.Tensor, lr: float) -> bool:
        self.noted.append((float(g[0]), lr))
        return True

    def read(self, out: torch.Tensor) -> None: ...

    def barrier(self) -> None: ...

    def average_buffers(self) -> None: ...


def test_compensation_goes_by_the_highest_rate_since_the_last_write() -> None:
    """Else the steps at 0.1 would count as gradients of 1e5, whose squares are the compensation."""
    alone: Any = Alone()
    steps: Any = Hogwild(every=3).worker(alone)
    next(steps)
    for alone.lr in (0.1, 0.1, 1e-6, 1e-6, 0.0):
        steps.send(SimpleNamespace(samples=1, vector=torch.zeros(1)))
    with pytest.raises(StopIteration):
        steps.send(None)
    assert alone.noted == [(pytest.approx(2.0, rel=1e-4), 0.1), (pytest.approx(1.0, rel=0.01), 1e-6)]


@pytest.mark.parametrize("rate", ["warm-up", "cosine", "frozen"])
@pytest.mark.parametrize("strategy", ["hogwild", "leashed:every=7,stale=delay-compensated", "mutex:every=3"])
def test_a_rate_of_zero_is_a_step_of_zero(strategy: str, rate: str) -> None:
    """In a user's own loop, whose schedule begins or ends at 0, or freezes the first group."""

    scales: dict[str, Callable[[int], float]] = {
        "warm-up": lambda step: min(1, step / 5),
        "cosine": lambda step: 1 - step / 10,
        "frozen": lambda step: 1.0,
    }
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with hocket.join(strategy=strategy) as team:
        first = {"params": model[0].parameters(), "lr": 0.0 if rate == "frozen" else 0.1}
        groups = [first, {"params": model[2].parameters()}]
        model, optimizer = team.prepare(model, torch.optim.SGD(groups, lr=0.1))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, scales[rate])
        for inputs, targets in team.shard(TensorDataset(*tiny.samples(40)), batch_size=4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            schedule.step()
    after = list(model.parameters())
    assert all(parameter.isfinite().all() for parameter in after)
    assert not torch.equal(after[2], before[2])
    assert torch.equal(after[0], before[0]) == (rate == "frozen")


@pytest.mark.parametrize("engine", ["threads", "sim"])
@pytest.mark.parametrize("method", METHODS)
def test_workers_learn_together(method: Any, engine: str) -> None:
    epochs = 12
    result = hocket.fit(
        "digits", strategy=f"{method}:every=4", engine=engine, workers=3, epochs=epochs, momentum=0.0, progress=False
    )
    assert result.test_accuracy > 0.7
    assert result.shared is not None
    steps = [worker["steps"] for worker in result.per_worker]
    assert sum(steps) / 4 <= result.shared["updates"] <= sum(steps) / 4 + 3 * epochs
    sharing = strategy.make(result.strategy).sharing(1, 3)
    assert sharing is not None and result.shared["peak_vectors"] <= sharing.vectors


@pytest.mark.parametrize("name", ["svm", "factorization"])
def test_sparse_tasks_learn(name: str) -> None:
    result = hocket.fit(name, strategy="hogwild:every=16", workers=2, progress=False)
    assert result.test_metric is not None
    assert result.test_metric < 0.5 if name == "factorization" else result.test_metric > 0.9


def test_every_is_checked() -> None:
    with pytest.raises(UserError, match="hogwild: every must be from 1 to 1000000000, got 0"):
        hocket.fit("digits", strategy="hogwild:every=0", workers=2, epochs=1, progress=False)
