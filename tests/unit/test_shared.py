"""The shared vector: what its four methods promise, in threads."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from canary import in_threads, values

from hocket.core.errors import UserError
from hocket.core.sharing import MAX_WORKERS, Backoff, Method, Sharing
from hocket.kernels.memory import block as block_module
from hocket.kernels.memory.block import Block
from hocket.kernels.memory.updates import close_write, next_batch, open_read, open_write, release, stopped
from hocket.kernels.memory.vector import LockBroken, MappedVector
from hocket.kernels.memory.words import APPLIED, CANARY, DROPPED, NO_ROW, RETRY

METHODS = get_args(Method)
LOCKS = ("mutex", "rwlock")
UPDATES = 100_000
ROUNDS = 30  # chances for workers to meet; the first one is nearly always enough


def make(method: Any, dim: int = 10, workers: int = 2, **options: Any) -> MappedVector:
    sharing = Sharing(method, dim, workers, **options)
    return MappedVector.create(sharing, torch.zeros(dim))


def counted_everything(vector: MappedVector, updates: int) -> None:
    assert set(values(vector).tolist()) == {float(updates)}
    statistics = vector.statistics()
    assert vector.version == statistics.updates == statistics.staleness.total() == updates
    assert not any(vector.references())
    assert statistics.peak_vectors <= vector.sharing.vectors


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("method", ["mutex", "rwlock", "leashed"])
def test_no_read_is_torn_and_no_update_lost(method: str, workers: int, sparse: bool) -> None:
    for _ in range(ROUNDS):
        vector = make(method, dim=1000, workers=workers)
        assert in_threads(vector, UPDATES, sparse) == 0
        counted_everything(vector, UPDATES)
        statistics = vector.statistics()
        if method == "leashed":
            assert statistics.peak_vectors <= 3 * workers + 1
            assert statistics.tries.total() == UPDATES
        if statistics.lock_wait_s > 0 or statistics.tries.total() > statistics.tries[0]:
            return
    pytest.fail(f"the workers never met in {ROUNDS} rounds, so this shows nothing")


def test_hogwild_loses_updates() -> None:
    for _ in range(ROUNDS):
        vector = make("hogwild", dim=4000, workers=8)
        torn = in_threads(vector, UPDATES)
        assert vector.version == vector.statistics().updates == UPDATES
        if torn and values(vector).min() < UPDATES:
            return
    pytest.fail(f"not one update was lost in {ROUNDS} * {UPDATES}")


@pytest.mark.parametrize("backoff", get_args(Backoff))
@pytest.mark.parametrize("method", ["mutex", "rwlock", "leashed"])
def test_every_backoff_keeps_the_promises(method: str, backoff: str) -> None:
    vector = make(method, dim=1000, workers=4, backoff=backoff)
    assert in_threads(vector, 10_000) == 0
    counted_everything(vector, 10_000)


@pytest.mark.parametrize("method", METHODS)
def test_staleness_is_the_number_of_updates_since_the_read(method: str) -> None:
    vector, out = make(method), torch.empty(10)
    assert vector.seen_by(0).read(out) == 0
    for expected in range(3):
        assert vector.seen_by(1).read(out) == expected
        assert vector.seen_by(1).publish(torch.ones(10), 1.0)
    assert vector.seen_by(0).publish(torch.ones(10), 1.0)
    assert vector.statistics().staleness == Counter({0: 3, 3: 1})
    vector.snapshot(out)
    assert vector.version == 4
    assert out.tolist() == [-4.0] * 10


def test_the_last_bin_of_staleness_counts_all_beyond() -> None:
    vector, out = make("hogwild"), torch.empty(10)
    vector.seen_by(0).read(out)
    for _ in range(300):
        vector.seen_by(1).read(out)
        vector.seen_by(1).publish(torch.ones(10), 1.0)
    vector.seen_by(0).publish(torch.ones(10), 1.0)
    assert vector.statistics().staleness == Counter({0: 300, 255: 1})


@pytest.mark.parametrize(("persistence", "outcomes"), [(0, [DROPPED]), (1, [RETRY, DROPPED]), (None, [RETRY] * 4)])
def test_an_update_is_dropped_after_more_failures_than_its_persistence(
    persistence: int | None, outcomes: list[int]
) -> None:
    vector = make("leashed", persistence=persistence)
    arrays = vector.control, vector.rows
    for outcome in outcomes:
        row = open_write(*arrays, 0, 10)
        vector.seen_by(1).publish(torch.ones(10), 1.0)
        assert close_write(vector.control, 0, row) == outcome
    assert vector.statistics().dropped == outcomes.count(DROPPED)
    assert close_write(vector.control, 0, open_write(*arrays, 0, 10)) == APPLIED
    assert vector.statistics().tries[len(outcomes)] == 1
    assert not any(vector.references())


@pytest.mark.parametrize("backoff", ["none", "yield", "exponential"])
@pytest.mark.parametrize("method", LOCKS)
def test_a_lock_that_never_comes_free_ends_the_run_at_its_deadline(method: str, backoff: Any) -> None:
    vector = make(method, backoff=backoff, deadline_s=0.2)
    out = torch.empty(10)
    with ThreadPoolExecutor(1) as elsewhere:
        row = elsewhere.submit(open_write, vector.control, vector.rows, 0, 10).result()
        start = time.monotonic()
        with pytest.raises(LockBroken, match=f"worker 1 waited 0.2 s for the {method}"):
            vector.seen_by(1).read(out)
        with pytest.raises(LockBroken):
            vector.seen_by(1).publish(out, 1.0)
        assert 0.3 < time.monotonic() - start < 30
        elsewhere.submit(close_write, vector.control, 0, row).result()
    assert stopped(vector.control)
    assert vector.statistics().broken == 2
    assert vector.statistics().lock_wait_s > 0.3
    assert vector.seen_by(1).read(out) == 1


def test_leashed_without_a_free_slot_ends_the_run_at_its_deadline() -> None:
    vector = make("leashed", deadline_s=0.2)
    for _ in range(2):  # reads that are never closed
        open_read(vector.control, 0)
        vector.seen_by(1).publish(torch.ones(10), 1.0)
    rows = [open_write(vector.control, vector.rows, 1, 10) for _ in range(3)]
    assert rows[:2] != [NO_ROW, NO_ROW] and rows[2] == NO_ROW
    assert stopped(vector.control)
    assert vector.statistics().broken == 1


def test_readers_share_a_rwlock() -> None:
    vector = make("rwlock", deadline_s=0.2)
    with ThreadPoolExecutor(1) as elsewhere:
        elsewhere.submit(open_read, vector.control, 0).result()
        assert open_read(vector.control, 1) == 0


def test_a_row_can_be_given_back_without_an_update() -> None:
    vector = make("leashed")
    release(vector.control, 0, open_read(vector.control, 0))
    assert not any(vector.references())


def test_each_batch_is_handed_out_once() -> None:
    vector = make("hogwild")
    with ThreadPoolExecutor(4) as threads:
        batches = list(threads.map(lambda _: next_batch(vector.control), range(1000)))
    assert sorted(batches) == list(range(1000))


@pytest.mark.parametrize("has_room", [True, False])
def test_a_block_is_one_memory_under_its_path_and_leaves_nothing(
    has_room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_room:
        monkeypatch.setattr(block_module, "place", lambda: str(tmp_path / "nowhere"))
    block = Block.create(4096)
    assert block.path is not None
    other = Block.attach(block.path)
    path = Path(block.path)
    block.unlink()
    block.memory[7] = 42
    assert other.memory[7] == 42
    assert not path.exists()
    block.unlink()


def test_a_block_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match="no room"):
        Block.create(1 << 50)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"workers": 0}, "takes 1 to"),
        ({"workers": MAX_WORKERS + 1}, "takes 1 to"),
        ({"persistence": -1}, "persistence"),
        ({"backoff_s": 0.0}, "backoff"),
        ({"backoff_s": 0.1}, "backoff"),
        ({"backoff_max_s": 2.0}, "backoff"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        make("leashed", **options)


def test_what_the_canary_misses_was_lost() -> None:
    """Of 10 updates others wrote over 3; and a lone worker loses none."""
    vector = make("hogwild", workers=1)
    in_threads(vector, 10)
    assert vector.statistics().lost == 0
    vector.control[CANARY] -= 3
    assert vector.statistics().lost == pytest.approx(0.3)


def test_the_canary_misses_what_the_parameters_miss() -> None:
    """To an order of magnitude: they lie elsewhere, and a worker that the system stops in a write loses much there."""
    for _ in range(ROUNDS):
        vector = make("hogwild", dim=4000, workers=8)
        in_threads(vector, UPDATES)
        missing = 1 - float(np.median(values(vector))) / UPDATES
        if missing > 1e-3:
            assert missing / 10 < vector.statistics().lost < min(missing * 10, 1)
            return
    pytest.skip("the workers hardly ever met")
