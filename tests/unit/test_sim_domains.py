"""Memory domains in virtual time: what is far takes longer, and what many want is waited for."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from tiny import on_sim

from hocket.core.comm import Rank
from hocket.core.errors import UserError
from hocket.core.sharing import Method, Sharing
from hocket.engines.catalogue import engine

METHODS = get_args(Method)
BLOCK = 10
BLOCK_S = BLOCK * 4 / 1000
"""One pass over a block that is near, at a kilobyte a second."""
QUICK = "1GB"
"""A controller that nobody waits for."""


def times(method: str, workers: int, blocks: int, updates: int = 0, **options: Any) -> list[float]:
    """When each worker is through with a read, or with so many rounds of read, gradient and update."""

    def main(rank: Rank) -> float:
        dim = blocks * BLOCK
        shared = rank.comm.share(Sharing(method, dim, rank.comm.size), torch.zeros(dim))  # type: ignore[arg-type]
        x = torch.empty(dim)
        shared.read(x)
        for k in range(updates):
            rank.clock.charge(1 + (rank.comm.rank * 5 + k * 3) % 7 / 7)
            shared.publish(torch.ones(dim), 0.1)
            shared.read(x)
        return rank.clock.now()

    found: list[float] = on_sim(main, workers, **(dict(compute="100ms", memory="1KB", block=BLOCK) | options))
    return found


@pytest.mark.parametrize("method", ["mutex", "rwlock", "hogwild"])
def test_a_far_block_takes_so_many_times_as_long(method: str) -> None:
    """Of four blocks, two lie in the other domain."""
    (near,) = times(method, 1, 4, domains=1, controller=QUICK, far=3)
    (half_far,) = times(method, 1, 4, domains=2, controller=QUICK, far=3)
    assert near == pytest.approx(4 * BLOCK_S)
    assert half_far == pytest.approx((2 + 2 * 3) * BLOCK_S)


def test_a_gradient_in_place_pays_for_what_is_far_alone() -> None:
    """A worker of Leashed-SGD reads while it computes."""
    assert times("leashed", 1, 4, domains=1, controller=QUICK) == pytest.approx([0.0])
    assert times("leashed", 1, 4, domains=2, controller=QUICK, far=3) == pytest.approx([2 * 2 * BLOCK_S])


@pytest.mark.parametrize("method", ["rwlock", "hogwild"])
def test_two_workers_queue_at_one_controller(method: str) -> None:
    """It is as fast as one worker: the second comes in after each of the first one's blocks."""
    first, second = sorted(times(method, 2, 3, domains=1, controller="1KB"))
    assert (first, second) == pytest.approx((5 * BLOCK_S, 6 * BLOCK_S))


@pytest.mark.parametrize("method", ["rwlock", "hogwild"])
def test_two_domains_halve_the_queue(method: str) -> None:
    """Eight workers read sixteen blocks through one controller, or through two at once."""
    one, two = (max(times(method, 8, 16, domains=n, controller="1KB", far=1)) for n in (1, 2))
    assert one == pytest.approx(8 * 16 * BLOCK_S)
    assert two == pytest.approx(one / 2, rel=0.1)


def test_a_controller_slower_than_a_worker_holds_it_up() -> None:
    assert times("mutex", 1, 4, domains=1, controller="500B") == pytest.approx([8 * BLOCK_S])


def test_a_sparse_update_goes_where_its_parameters_lie() -> None:
    """Two parameters in each of two domains, and a line of the cache moves for each."""

    def main(rank: Rank) -> float:
        dim = 20 * BLOCK
        shared = rank.comm.share(Sharing("hogwild", dim, 1), torch.zeros(dim))
        step = torch.zeros(dim)
        step[[0, 5, BLOCK, 3 * BLOCK]] = 1.0
        shared.publish(step, 1.0)
        return rank.clock.now()

    line_s = 2 * 64 / 1000
    sim = dict(memory="1KB", block=BLOCK, controller=QUICK, far=3)
    assert on_sim(main, 1, domains=1, **sim) == pytest.approx([4 * line_s])
    assert on_sim(main, 1, domains=2, **sim) == pytest.approx([(2 + 2 * 3) * line_s])


@pytest.mark.parametrize("method", METHODS)
def test_one_domain_that_nobody_waits_for_is_none(method: str) -> None:
    usual = times(method, 4, 3, updates=5)
    assert times(method, 4, 3, updates=5, domains=1, controller="1000GB") == pytest.approx(usual, rel=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_it_repeats_exactly(method: str) -> None:
    crowded = dict(updates=5, domains=2, controller="2KB")
    assert times(method, 6, 5, **crowded) == times(method, 6, 5, **crowded)
    assert max(times(method, 6, 5, **crowded)) > max(times(method, 6, 5, updates=5)), "they waited"


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ("domains=-1", "domains must be 0 or more"),
        ("domains=2,far=0.5", "far must be 1 or more"),
        ("domains=2,far=inf", "far must be"),
        ("domains=2,controller=fast", "controller: cannot read 'fast' as a rate"),
    ],
)
def test_what_makes_no_sense_is_one_line(option: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint) as refused:
        engine.make(f"sim:{option}")
    assert "\n" not in str(refused.value)
