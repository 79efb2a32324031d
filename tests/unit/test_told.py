"""HOGWILD! by rows: every worker's copy gets every update once, and alone it takes the steps of the plain loop."""

from __future__ import annotations

from threading import Barrier, Thread
from typing import Any

import numpy as np
import pytest
import torch
from test_sparse import LOSSES, a_model, parameters, run_epoch_of, some_rows

import hocket
from hocket.core.sharing import Sharing
from hocket.kernels.memory.gather import CompiledVector
from hocket.kernels.memory.vector import MappedVector
from hocket.kernels.memory.words import FIRST, LEFT, NEXT, STOP, STRETCH
from hocket.kernels.models.family import DIVERGED, DONE, STOPPED
from hocket.kernels.models.told import Told, hear
from hocket.strategies.shared_memory import CACHED, Hogwild
from hocket.tasks.base import SampleSet, compiled

ROWS, BATCH = 2_000, 16


def a_kernel(loss: Any = LOSSES[1], l2: float = 0.5, rows: int = ROWS) -> Any:
    data = some_rows(4, rows=rows)
    kernel = compiled(a_model(data, l2), loss, SampleSet(data, "train"))
    assert kernel is not None
    return kernel


def share(kernel: Any, workers: int, by_rows: bool = True, fill: float = 0.0) -> MappedVector:
    sharing = Sharing("hogwild", kernel.dim, workers, by_rows=by_rows)
    return MappedVector.create(sharing, torch.full((kernel.dim,), fill))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("batch", [1, 7, 16])
@pytest.mark.parametrize("rows", [ROWS, ROWS - 5])
def test_alone_it_takes_the_steps_of_the_plain_loop(loss: Any, batch: int, rows: int) -> None:
    kernel = a_kernel(loss, rows=rows)
    found = []
    for by_rows in (False, True):
        vector, worker = share(kernel, 1, by_rows), kernel.worker(0, batch)
        for epoch in range(3):
            vector.hand_out(0)
            order = np.random.default_rng(epoch).permutation(rows)
            assert worker.run_epoch(vector, order, 0.1) == DONE
        found.append((parameters(vector), worker.log.loss, vector.statistics()))
    np.testing.assert_array_equal(found[1][0], found[0][0])
    np.testing.assert_array_equal(found[1][1], found[0][1])
    assert found[1][2].updates == found[0][2].updates and found[1][2].staleness == found[0][2].staleness


@pytest.mark.parametrize(("strategy", "is_said"), [("hogwild", 1), ("hogwild:exchange=weights", 0), ("leashed", 0)])
def test_a_run_says_that_it_departs_from_the_paper(
    strategy: str, is_said: int, capsys: pytest.CaptureFixture[str]
) -> None:
    hocket.fit("svm", strategy=strategy, workers=2, engine="threads", epochs=1, driver="compiled")
    assert capsys.readouterr().err.count("hogwild:exchange=weights is the method as published") == is_said


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_the_vector_gets_what_every_batch_changed_once(workers: int) -> None:
    """Each row has a column of its own, so nothing depends on the order in which updates come."""
    from hocket.kernels.models.sparse import SparseKernel

    columns, ones = np.arange(ROWS, dtype=np.int32), np.ones(ROWS, np.float32)
    kernel = SparseKernel(np.arange(ROWS + 1), columns, ones, ones, np.ones(ROWS, np.int64), 0.0, hinge=True)
    vector, crew = share(kernel, workers), [kernel.worker(w, BATCH) for w in range(workers)]
    for epoch in range(1, 4):
        vector.hand_out(0)
        run_epoch_of(crew, vector, np.random.default_rng(epoch).permutation(ROWS), 0.0016)
        np.testing.assert_allclose(parameters(vector)[:-1], 1e-4 * epoch, rtol=1e-5)
        assert parameters(vector)[-1] == pytest.approx(1e-4 * epoch * ROWS, rel=1e-3)  # every row has the bias
    statistics = vector.statistics()
    assert vector.version == statistics.updates == sum(statistics.staleness.values()) == 3 * ROWS // BATCH
    assert statistics.lost == 0
    assert statistics.peak_vectors == 1 + 2 * workers


def test_a_batch_that_is_not_done_is_heard_when_it_is() -> None:
    kernel = a_kernel(LOSSES[0], l2=0.0, rows=48)
    vector, order = share(kernel, 2), np.arange(48)
    vector.hand_out(0)
    rng = np.random.default_rng(0)
    told = Told(
        rng.standard_normal(48).astype(np.float32),
        np.zeros(3 * 8, np.int64),
        np.zeros(kernel.dim, np.float32),
        np.zeros(2, np.int64),
    )
    shared, chosen = CompiledVector(vector.control, vector.rows, 0), np.zeros(BATCH, np.int64)

    def heard(missing: int, begin: int) -> tuple[int, np.ndarray]:
        before = told.x.copy()
        left = hear(shared, told, kernel.data, order, BATCH, 0.1, chosen, missing, begin, 2)
        return left, told.x - before

    told.done[8] = vector.control[STRETCH]  # of batches 0 and 1 the second is done
    left, second = heard(0, 0)
    assert left == 1 and told.missing[0] == 0 and np.any(second)
    left, nothing = heard(1, 2)
    assert left == 1 and not np.any(nothing)
    told.done[0] = vector.control[STRETCH] - 1  # in the stretch before
    assert heard(1, 2)[0] == 1
    told.done[0] = vector.control[STRETCH]
    left, first = heard(1, 2)
    assert left == 0
    expected = -0.1 / BATCH * told.slopes[:BATCH].sum()
    assert first[-1] == pytest.approx(expected, rel=1e-4)


def test_a_stretch_may_begin_in_the_middle_of_an_epoch() -> None:
    kernel = a_kernel()
    whole, parts = share(kernel, 1), share(kernel, 1)
    order, worker = np.random.default_rng(0).permutation(ROWS), kernel.worker(0, BATCH)
    whole.hand_out(0)
    worker.run_epoch(whole, order, 0.1)
    for first, last in ((0, 50), (50, 125)):
        parts.hand_out(first)
        assert parts.control[FIRST] == first
        worker.run_epoch(parts, order[: last * BATCH], 0.1)
    np.testing.assert_allclose(parameters(parts), parameters(whole), rtol=1e-3, atol=1e-4)  # whose rows pay differs


def test_only_the_last_to_end_writes_the_vector() -> None:
    """Who is early does not know what others are still computing."""
    kernel = a_kernel()
    vector, crew = share(kernel, 2), [kernel.worker(w, BATCH) for w in range(2)]
    vector.hand_out(0)
    order = np.arange(ROWS)
    assert crew[0].run_epoch(vector.seen_by(0), order, 0.1) == DONE
    assert vector.control[LEFT] == 1 and not np.any(parameters(vector))
    assert crew[1].run_epoch(vector.seen_by(1), order, 0.1) == DONE  # late: no batch is left
    alone = share(kernel, 1)
    alone.hand_out(0)
    crew[0].run_epoch(alone, order, 0.1)
    np.testing.assert_allclose(parameters(vector), parameters(alone), rtol=1e-4, atol=1e-5)


def test_workers_stop_when_told_and_where_a_loss_is_not_finite() -> None:
    kernel = a_kernel(LOSSES[0])
    vector, crew = share(kernel, 2, fill=float("nan")), [kernel.worker(w, BATCH) for w in range(2)]
    vector.hand_out(0)
    ends: dict[int, int] = {}
    ready = Barrier(2)

    def run(w: int) -> None:
        ready.wait()
        ends[w] = crew[w].run_epoch(vector.seen_by(w), np.arange(ROWS), 0.1)

    threads = [Thread(target=run, args=(w,)) for w in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert DIVERGED in ends.values() and set(ends.values()) <= {DIVERGED, STOPPED}
    assert vector.control[STOP] == 1 and vector.control[NEXT] <= 2


def test_the_default_shares_by_rows_where_copies_are_near() -> None:
    def by_rows(strategy: Hogwild, dim: int = 1000, workers: int = 2, able: bool = True) -> bool:
        return strategy.compiled_sharing(dim, workers, sparse=True, by_rows=able).by_rows

    assert by_rows(Hogwild()) and by_rows(Hogwild(), workers=8) and by_rows(Hogwild(), dim=CACHED)
    assert not by_rows(Hogwild(), workers=1)
    assert not by_rows(Hogwild(), dim=CACHED + 1)
    assert not by_rows(Hogwild(), able=False)
    assert not by_rows(Hogwild(exchange="weights"))
    assert not by_rows(Hogwild(every=2))
    assert not by_rows(Hogwild(stale="max1"))
    assert Hogwild(every=2).idle()["exchange"] == "every" and "exchange" not in Hogwild().idle()


@pytest.mark.parametrize("exchange", ["auto", "weights"])
def test_a_run_learns_and_says_how_it_shared(exchange: str) -> None:
    found = hocket.fit("svm", strategy=f"hogwild:exchange={exchange}", workers=2, epochs=3, evaluate_every=100)
    assert found.shared is not None and found.shared["updates"] == 3 * 16_000 // 16
    assert found.shared["peak_vectors"] == (5 if exchange == "auto" else 3)
    assert (found.test_metric or 0) > 0.9
