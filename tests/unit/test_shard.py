"""Who trains on which samples."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.core.shard import Shards

quick = settings(max_examples=150)
sizes = dict(
    samples=st.integers(1, 120),
    workers=st.integers(1, 9),
    batch=st.integers(1, 12),
    seed=st.integers(0, 2**40 - 1),
    epoch=st.integers(0, 1000),
)


def batches(samples: int, workers: int, batch: int, seed: int, epoch: int) -> list[list[list[int]]]:
    """The sample numbers by worker and step."""
    shards = Shards(samples, workers, batch, seed)
    found = [[b.tolist() for b in shards.epoch(epoch, rank)] for rank in range(workers)]
    assert all(len(own) == shards.steps for own in found), "every worker takes part in every step"
    return found


@quick
@given(**sizes)
def test_every_sample_exactly_once_an_epoch(samples: int, workers: int, batch: int, seed: int, epoch: int) -> None:
    seen = [i for own in batches(samples, workers, batch, seed, epoch) for b in own for i in b]
    assert sorted(seen) == list(range(samples))


@quick
@given(**sizes)
def test_n_workers_of_batch_b_are_one_of_batch_nb(
    samples: int, workers: int, batch: int, seed: int, epoch: int
) -> None:
    many = batches(samples, workers, batch, seed, epoch)
    (one,) = batches(samples, 1, workers * batch, seed, epoch)
    assert [[i for b in step for i in b] for step in zip(*many, strict=True)] == one


@quick
@given(**sizes)
def test_batches_are_full_but_for_the_last_which_is_shared_evenly(
    samples: int, workers: int, batch: int, seed: int, epoch: int
) -> None:
    lengths = [[len(b) for b in own] for own in batches(samples, workers, batch, seed, epoch)]
    for step, found in enumerate(zip(*lengths, strict=True)):
        if step < len(lengths[0]) - 1:
            assert set(found) == {batch}
        else:
            assert max(found) - min(found) <= 1 and max(found) <= batch


@quick
@given(
    a=st.tuples(st.integers(0, 2**40 - 1), st.integers(0, 1000)),
    b=st.tuples(st.integers(0, 2**40 - 1), st.integers(0, 1000)),
)
def test_the_order_is_a_function_of_seed_and_epoch(a: tuple[int, int], b: tuple[int, int]) -> None:
    """Two of the 50! orders agree by chance about never."""
    first, second = (Shards(50, 1, 1, seed).order(epoch).tolist() for seed, epoch in (a, b))
    assert (first == second) == (a == b)
    assert Shards(50, 3, 4, a[0]).order(a[1]).tolist() == first, "whatever the number of workers"
