"""Workers and what they share are put into memory domains: here such as a test pretends to have."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import hocket
from hocket.core.comm import Rank
from hocket.core.errors import UserError
from hocket.core.sharing import Sharing
from hocket.engines import nodes
from hocket.engines.binding import allowed_cores
from hocket.engines.catalogue import engine
from hocket.engines.engine import Listener

CORES = sorted(allowed_cores())
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="two domains need two cores")


def pretend(monkeypatch: pytest.MonkeyPatch, root: Path, *cpulists: str) -> None:
    for i, cpulist in enumerate(cpulists):
        (root / f"node{i}").mkdir()
        (root / f"node{i}/cpulist").write_text(cpulist + "\n")
    (root / "possible").write_text("0-7\n")
    monkeypatch.setattr(nodes, "NODES", root)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two domains with a core each."""
    pretend(monkeypatch, tmp_path, str(CORES[0]), str(CORES[1]))


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path, f"0-{CORES[-1]}")


def where_ranks_are(text: str, size: int) -> list[list[int]]:
    def main(rank: Rank) -> list[int]:
        rank.comm.share(Sharing("hogwild", 5000, size), torch.zeros(5000))
        return sorted(os.sched_getaffinity(0))

    return engine.make(text).run(main, size, Listener())


@two_cores
@pytest.mark.usefixtures("two")
def test_spread_ties_workers_to_the_domains_in_turn() -> None:
    assert where_ranks_are("threads:domains=spread", 2) == [[CORES[0]], [CORES[1]]]
    assert sorted(allowed_cores()) == CORES, "the caller is as free as before"


@two_cores
@pytest.mark.usefixtures("two")
def test_one_ties_all_workers_to_one_domain() -> None:
    assert where_ranks_are("threads:domains=one", 1) == [[CORES[0]]]
    assert where_ranks_are("threads", 2) == [CORES, CORES]


@two_cores
@pytest.mark.usefixtures("two")
def test_more_workers_than_a_domain_has_cores_are_refused() -> None:
    with pytest.raises(UserError, match="domains=one: 2 workers would share the 1 cores of one memory domain"):
        engine.make("threads:domains=one").check(2)
    with pytest.raises(UserError, match="domains=spread: 2 workers would share"):
        engine.make("threads:domains=spread").check(3)


@pytest.mark.usefixtures("one")
def test_one_domain_is_nothing_to_spread_over() -> None:
    with pytest.raises(
        UserError, match=r"needs two memory domains or more, and this machine has one; .* --sim domains=2"
    ):
        engine.make("threads:domains=spread").check(1)
    engine.make("threads:domains=one").check(len(CORES))


def test_where_nobody_tells_of_domains_all_cores_are_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nodes, "NODES", tmp_path / "nothing")
    assert nodes.domains_here() == [allowed_cores()]


def test_only_cores_that_may_be_used_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second domain has memory and no core; the third has none that this process may use."""
    pretend(monkeypatch, tmp_path, "0-3,8", "", "4-7,9", "16-18")
    monkeypatch.setattr(nodes, "allowed_cores", lambda: frozenset({1, 2, 7, 8}))
    assert nodes.domains_here() == [{1, 2, 8}, {7}]


def test_pages_are_touched_first_in_their_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    tied: list[Any] = [None]
    monkeypatch.setattr(nodes, "tie_to", lambda cores: tied.append(cores))
    touched: dict[int, Any] = {}

    class Pages:
        def __len__(self) -> int:
            return 5 * mmap.PAGESIZE - 100

        def __setitem__(self, at: int, value: int) -> None:
            assert at < len(self) and at % mmap.PAGESIZE == 0 == value
            touched[at // mmap.PAGESIZE] = tied[-1]

    a, b = frozenset({0}), frozenset({1})
    nodes.Placement([a, b]).lay_out(Pages())  # type: ignore[arg-type]
    assert touched == {0: a, 1: b, 2: a, 3: b, 4: a}
    assert tied[-1] == allowed_cores(), "then it goes where it was before"


@two_cores
@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("driver", ["compiled", "pytorch"])
def test_a_run_learns_wherever_its_workers_are(driver: str) -> None:
    result = hocket.fit(
        "digits", strategy="leashed", engine="threads:domains=spread", driver=driver, epochs=3, progress=False
    )
    assert result.test_metric is not None and result.test_metric > 0.8
