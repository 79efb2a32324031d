"""Sparse linear models: compiled gradients equal autograd's, which equal the formulas."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch

from hocket.core.errors import UserError
from hocket.core.replica import Replica
from hocket.core.sharing import Sharing
from hocket.kernels.memory.scatter import Touched
from hocket.kernels.memory.vector import MappedVector
from hocket.kernels.memory.words import NEXT, STOP
from hocket.kernels.models.family import DIVERGED, DONE, STOPPED
from hocket.kernels.models.scoring import PAID_TOGETHER
from hocket.kernels.models.sparse import SparseKernel, linear_gradient
from hocket.tasks import Task, task
from hocket.tasks.base import SampleSet, compiled, make_task
from hocket.tasks.linear import SparseLinear, SparseRows, hinge_loss, logistic_loss
from hocket.tasks.svmlight import Table

LOSSES = [logistic_loss, hinge_loss]


def some_rows(seed: int, rows: int = 40, features: int = 12) -> SparseRows:
    """Rows of 0 to 5 elements; columns may repeat."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 6, rows)
    pointers = np.concatenate([[0], np.cumsum(lengths)])
    columns = rng.integers(0, features, pointers[-1]).astype(np.int32)
    values = rng.standard_normal(pointers[-1]).astype(np.float32)
    targets = rng.choice(np.array([-1, 1], np.float32), rows)
    return SparseRows(Table(targets, pointers, columns, values), targets, features)


def a_model(data: SparseRows, l2: float, seed: int = 0) -> SparseLinear:
    model = SparseLinear(torch.from_numpy(np.bincount(data.table.columns, minlength=data.features)), l2)
    with torch.no_grad():
        torch.manual_seed(seed)
        model.weight.normal_()
        model.bias.normal_()
    return model


def dense(data: SparseRows) -> torch.Tensor:
    x = torch.zeros(len(data), data.features)
    rows = np.repeat(np.arange(len(data)), np.diff(data.table.pointers))
    x.index_put_(
        (torch.from_numpy(rows), torch.from_numpy(data.table.columns)), torch.from_numpy(data.table.values), True
    )
    return x


def share(kernel: Any, x: np.ndarray, method: Any = "hogwild", workers: int = 1, **options: Any) -> MappedVector:
    sharing = Sharing(method, kernel.dim, workers, **options)
    return MappedVector.create(sharing, torch.from_numpy(x))


def run_epoch_of(workers: list[Any], vector: MappedVector, order: np.ndarray, lr: float) -> None:
    """An epoch in threads. Each worker has a number of its own: one that two threads use counts staleness below 0."""
    threads = [Thread(target=w.run_epoch, args=(vector.seen_by(i), order, lr)) for i, w in enumerate(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def parameters(vector: MappedVector) -> np.ndarray:
    out = torch.empty(vector.sharing.dim)
    vector.snapshot(out)
    return out.numpy()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("chosen", [[3], [0, 7, 7, 20, 39], list(range(40))])
def test_autograd_gives_the_formula_with_the_penalty_on_touched_columns(loss: Any, chosen: list[int]) -> None:
    data, l2 = some_rows(1), 0.7
    model = a_model(data, l2)
    batch, targets = data.take(torch.tensor(chosen))
    loss(model(batch), targets).backward()

    x = dense(data)[chosen]
    weight = model.weight.detach().requires_grad_()
    bias = model.bias.detach().requires_grad_()
    loss(x @ weight + bias, targets).backward()
    touches = torch.zeros(data.features)
    touches.index_add_(0, batch.columns, torch.ones(len(batch.columns)))
    rows_with = model.rows_with.clamp(min=1)
    penalty = l2 * touches / len(chosen) * weight.detach() / rows_with
    assert weight.grad is not None and model.weight.grad is not None and model.bias.grad is not None
    torch.testing.assert_close(model.weight.grad, weight.grad + penalty)
    torch.testing.assert_close(model.bias.grad, bias.grad)


def test_an_evaluated_model_has_no_penalty() -> None:
    data = some_rows(1)
    model = a_model(data, 5.0).eval()
    batch, targets = data.take(torch.arange(40))
    logistic_loss(model(batch), targets).backward()
    free = a_model(data, 0.0)
    logistic_loss(free(batch), targets).backward()
    torch.testing.assert_close(model.weight.grad, free.weight.grad)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("l2", [0.0, 0.7])
@pytest.mark.parametrize("chosen", [[5], [0, 7, 7, 20, 39], list(range(40))])
def test_the_compiled_gradient_equals_autograd(loss: Any, l2: float, chosen: list[int]) -> None:
    data = some_rows(2)
    model = Replica(a_model(data, l2))
    batch, targets = data.take(torch.tensor(chosen))
    expected = loss(model.model(batch), targets)
    expected.backward()

    kernel = compiled(model.model, loss, SampleSet(data, "train"))
    assert isinstance(kernel, SparseKernel) and kernel.dim == len(model.x)
    touched = Touched.empty(300)
    x = model.x.detach().numpy()
    value, count = linear_gradient(x, kernel.data, np.array(chosen), touched)
    gradient = np.zeros(kernel.dim, np.float32)
    np.add.at(gradient, touched.at[:count], touched.g[:count])
    assert value == pytest.approx(float(expected.detach()), rel=1e-5)
    np.testing.assert_allclose(gradient, model.g.numpy(), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(touched.seen[:count], x[touched.at[:count]])


@pytest.mark.parametrize("method", ["mutex", "rwlock", "hogwild", "leashed"])
@pytest.mark.parametrize("batch", [1, 7])
def test_one_worker_without_penalty_does_what_plain_sgd_does(method: str, batch: int) -> None:
    data = some_rows(3)
    model = Replica(a_model(data, l2=0.0))
    kernel = compiled(model.model, hinge_loss, SampleSet(data, "train"))
    assert kernel is not None
    vector = share(kernel, model.x.detach().numpy(), method)
    worker = kernel.worker(0, batch)
    losses = []
    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(len(data))
        vector.control[NEXT] = 0
        assert worker.run_epoch(vector, order, 0.1) == DONE
        for chosen in torch.from_numpy(order).split(batch):
            inputs, targets = data.take(chosen)
            model.g.zero_()
            loss = hinge_loss(model.model(inputs), targets)
            loss.backward()
            losses.append(float(loss.detach()))
            with torch.no_grad():
                model.x -= 0.1 * model.g
        steps = -(-len(data) // batch)
        np.testing.assert_allclose(worker.log.loss, losses[-steps:], rtol=1e-4, atol=5e-4)
        assert worker.log.samples.sum() == len(data)
        assert np.all(np.diff(worker.log.clock_ns) > 0)
    np.testing.assert_allclose(parameters(vector), model.x.detach().numpy(), rtol=1e-4, atol=1e-5)
    statistics = vector.statistics()
    assert statistics.updates == len(losses) and statistics.staleness == {0: len(losses)}


def without_loss(data: SparseRows, rows_with: list[int], l2: float) -> SparseKernel:
    """A kernel whose rows, all of target 1, have no loss where the bias is 1 and no weight is below 0."""
    table = data.table
    counts, ones = np.array(rows_with), np.ones(len(data), np.float32)
    return SparseKernel(table.pointers, table.columns, abs(table.values), ones, counts, l2, hinge=True)


def after_an_epoch(kernel: SparseKernel, x: np.ndarray, order: np.ndarray, batch: int, method: str) -> np.ndarray:
    vector = share(kernel, x, method)
    assert kernel.worker(0, batch).run_epoch(vector, order, lr=1e-3) == DONE
    return parameters(vector)


@pytest.mark.parametrize("method", ["mutex", "rwlock", "hogwild", "leashed"])
@pytest.mark.parametrize("batch", [1, 8])
def test_each_row_pays_its_penalty_on_average(method: str, batch: int) -> None:
    # In as many orders as rows pay together, each a turn of the last, each row is once the one that pays
    data = some_rows(6, rows=4 * PAID_TOGETHER)
    rows_with = np.bincount(data.table.columns, minlength=data.features).tolist()
    kernel = without_loss(data, rows_with, l2=0.5)
    x = np.arange(1, kernel.dim + 1, dtype=np.float32)
    order = np.random.default_rng(0).permutation(len(data))
    ends = [after_an_epoch(kernel, x, np.roll(order, turn), batch, method) for turn in range(PAID_TOGETHER)]
    expected = x - 1e-3 / batch * 0.5 * x
    expected[-1] = x[-1]  # the bias has no penalty
    np.testing.assert_allclose(np.mean(ends, 0) - x, expected - x, rtol=0.02, atol=1e-5)


@pytest.mark.parametrize("rows", [1, PAID_TOGETHER - 1, PAID_TOGETHER, 3 * PAID_TOGETHER + 5])
def test_the_last_rows_of_an_order_pay_for_no_others(rows: int) -> None:
    table = Table(np.ones(rows, np.float32), np.arange(rows + 1), np.zeros(rows, np.int32), np.ones(rows, np.float32))
    kernel = without_loss(SparseRows(table, table.labels, 1), [rows], l2=10.0)
    end = after_an_epoch(kernel, np.ones(2, np.float32), np.arange(rows), 1, "hogwild")
    assert end[0] == pytest.approx(1 - 1e-3 * 10, rel=1e-4)


def test_a_penalty_never_changes_the_sign_of_a_weight() -> None:
    data = some_rows(6)
    kernel = without_loss(data, [1] * data.features, l2=1e6)
    end = after_an_epoch(kernel, np.ones(kernel.dim, np.float32), np.arange(len(data)), 4, "hogwild")
    paid = np.concatenate([np.arange(*data.table.pointers[[row, row + 1]]) for row in range(0, 40, PAID_TOGETHER)])
    expected = np.ones(kernel.dim)
    expected[data.table.columns[paid]] = 0
    np.testing.assert_array_equal(end, expected)


@pytest.mark.parametrize("handling", ["gap", "gap-mean", "delay-compensated", "inverse"])
@pytest.mark.parametrize("method", ["hogwild", "leashed"])
def test_fresh_updates_are_not_tempered(handling: Any, method: str) -> None:
    data = some_rows(3)
    kernel = compiled(a_model(data, 0.0), logistic_loss, SampleSet(data, "train"))
    assert kernel is not None
    x, order = np.ones(kernel.dim, np.float32), np.arange(len(data))
    plain, tempered = share(kernel, x, method), share(kernel, x, method, handling=handling)
    for vector in (plain, tempered):
        kernel.worker(0, 4).run_epoch(vector, order, 0.1)
    np.testing.assert_allclose(parameters(tempered), parameters(plain), rtol=1e-5)


def test_workers_share_an_epoch_and_stop_when_told() -> None:
    data = some_rows(4, rows=2_000)
    kernel = compiled(a_model(data, 0.5), hinge_loss, SampleSet(data, "train"))
    assert kernel is not None
    vector = share(kernel, np.zeros(kernel.dim, np.float32), "leashed", workers=2)
    workers = [kernel.worker(w, 3) for w in range(2)]
    run_epoch_of(workers, vector, np.arange(2_000), 0.1)
    assert sum(int(w.log.samples.sum()) for w in workers) == 2_000
    assert vector.statistics().updates == 667

    vector.control[NEXT] = 0
    vector.stop()
    assert workers[0].run_epoch(vector, np.arange(2_000), 0.1) == STOPPED
    assert len(workers[0].log.loss) == 0


def test_a_loss_that_is_not_finite_stops_everyone() -> None:
    data = some_rows(5)
    kernel = compiled(a_model(data, 0.5), logistic_loss, SampleSet(data, "train"))
    assert kernel is not None
    vector = share(kernel, np.full(kernel.dim, np.nan, np.float32))
    worker = kernel.worker(0, 4)
    assert worker.run_epoch(vector, np.arange(40), 0.1) == DIVERGED
    assert vector.control[STOP] == 1
    assert len(worker.log.loss) == 1 and np.isnan(worker.log.loss[0])


def train(given: Task, workers: int = 2) -> float:
    """The test metric after a run with the task's own settings."""
    train_set, test_set = given.load()
    model = Replica(given.build_model(0))
    kernel = compiled(model.model, given.loss, train_set)
    assert kernel is not None
    vector = share(kernel, model.x.detach().numpy(), workers=workers)
    crew = [kernel.worker(w, given.batch) for w in range(workers)]
    for epoch in range(given.epochs):
        vector.control[NEXT] = 0
        order = np.random.default_rng(epoch).permutation(kernel.samples)
        lr = given.lr * given.lr_decay**epoch
        run_epoch_of(crew, vector, order, lr)
    with torch.no_grad():
        model.x.copy_(torch.from_numpy(parameters(vector)))
        inputs, targets = test_set.take(torch.arange(len(test_set)))
        return float(given.metric(model.model.eval()(inputs), targets))


@pytest.mark.parametrize("name", ["logistic", "svm"])
def test_the_made_up_texts_are_learnt(name: str) -> None:
    given = make_task(task.make(name), 0, None)
    assert given.target is not None
    assert train(given) >= given.target


@pytest.mark.parametrize(("files", "least"), [(("imdb_train", "imdb_test"), 0.885), (("a9a", "a9a_test"), 0.847)])
@pytest.mark.parametrize("name", ["logistic", "svm"])
def test_real_texts_are_learnt_with_the_same_settings(name: str, files: tuple[str, str], least: float) -> None:
    folder = Path(os.environ.get("HOCKET_DATA", ""), "svm")
    paths = [folder / f"{file}.svm.gz" for file in files]
    if not all(path.is_file() for path in paths):
        pytest.skip(f"{paths[0]} is not here")
    given = make_task(task.make(name), 0, *paths)
    assert min(train(given, workers) for workers in (1, 2, 4)) >= least


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("labels", [(-1, 1), (0, 1), (1, 2)])
def test_labels_become_signs(tmp_path: Path, labels: tuple[int, int]) -> None:
    path = write(tmp_path / "rows", "".join(f"{labels[i % 2]} {i % 2}:1\n" for i in range(10)))
    train_set, test_set = make_task(task.make("svm:scale=false"), 0, path).load()
    assert (len(train_set), len(test_set)) == (8, 2)
    for samples in (train_set, test_set):
        inputs, targets = samples.take(torch.arange(len(samples)))
        assert targets.tolist() == (2.0 * inputs.columns - 1).tolist()


def test_the_seed_chooses_what_is_held_out(tmp_path: Path) -> None:
    path = write(tmp_path / "rows", "".join(f"{i % 2} {i}:1\n" for i in range(50)))

    def held_out(seed: int) -> list[int]:
        samples: Any = make_task(task.make("svm"), seed, path).load()[1].samples
        return samples.table.labels.tolist() + samples.table.columns.tolist()

    assert held_out(1) == held_out(1) != held_out(2)


def test_columns_that_training_has_not_seen_are_ignored(tmp_path: Path) -> None:
    train_file = write(tmp_path / "train", "1 1:2\n-1 3:2\n")
    test_file = write(tmp_path / "test", "1 1:2 9:5 3:4\n-1 2:7\n")
    given = make_task(task.make("logistic"), 0, train_file, test_file)
    samples: Any = given.load()[1].samples
    assert samples.table.columns.tolist() == [1, 3, 2]
    assert samples.table.values.tolist() == [1, 2, 3.5]  # the training rows have length 2, and are brought to 1
    assert samples.table.pointers.tolist() == [0, 2, 3]
    assert len(given.build_model(0).weight) == 4


@pytest.mark.parametrize(
    ("text", "test", "message"),
    [
        ("1 1:1\n2 1:1\n3 1:1\n", None, "labels must be -1 and 1, 0 and 1, or 1 and 2; this file has 1, 2, 3"),
        ("1 1:1\n1 1:1\n", None, "this file has 1$"),
        ("0.5 1:1\n1 1:1\n", None, "this file has 0.5, 1$"),
        ("0 1:1\n1 1:1\n", None, "has only 2 rows"),
        ("0 1:1\n1 1:1\n", "-1 1:1\n", "has the label -1, which .*train does not have"),
    ],
)
def test_what_cannot_be_learnt_is_refused(tmp_path: Path, text: str, test: str | None, message: str) -> None:
    train_file = write(tmp_path / "train", text)
    test_file = write(tmp_path / "test", test) if test else None
    with pytest.raises(UserError, match=message):
        make_task(task.make("svm"), 0, train_file, test_file).load()


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="l2 must be 0 or more"):
        task.make("svm:l2=-1")
    with pytest.raises(UserError, match="--test-data goes with --data"):
        make_task(task.make("logistic"), 0, None, tmp_path)
    with pytest.raises(UserError, match="task blobs has test samples of its own"):
        make_task(task.make("blobs"), 0, None, tmp_path)
