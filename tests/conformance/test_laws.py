"""Laws that hold for every strategy, on every engine, at 1, 2, 3, 5 and 8 ranks."""

from __future__ import annotations

import math
import os
from functools import cache
from pathlib import Path
from typing import Any

import laws
import pytest
from covering import THOROUGH

from hocket.engines.catalogue import Engine, Listener, Program, engine
from hocket.strategies import strategy

ENGINES = [name for name in engine if not engine[name].drives_all]
LARGEST = {"mpi": 5, "torch": 3}
"""Ranks that are processes, by default."""
SIZES = [1, 2, 3, 5, 8]

os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


def facts(name: str, size: int) -> list[dict[str, Any]]:
    """What each rank found, from one run of all the laws' cases."""
    found = _facts(name, size)
    if isinstance(found, Exception):
        raise found
    return found


@cache
def _facts(name: str, size: int) -> list[dict[str, Any]] | Exception:
    """A failure is kept too: what fails once need not be started again for every law."""
    chosen: Engine = engine.make(name)
    try:
        return chosen.run(Program("laws:run_all", {"pairwise": "polling" in chosen.offers}), size, Listener())
    except Exception as error:
        return error


every_engine_and_size = pytest.mark.parametrize(
    ("name", "size"),
    [pytest.param(e, s, marks=THOROUGH if s > LARGEST.get(e, s) else ()) for e in ENGINES for s in SIZES],
    ids=lambda v: str(v),
    scope="module",  # all laws of one start of the ranks in a row: workers of xdist then rarely start the same
)


def close(a: list[float], b: list[float]) -> bool:
    return a == pytest.approx(b, rel=1e-4, abs=1e-5)


@every_engine_and_size
@pytest.mark.parametrize("case", [("sgd", 0.0), ("sgd", 0.9), ("adam", 0.0)], ids=str)
def test_allreduce_is_serial_with_the_n_fold_batch(name: str, size: int, case: tuple[str, float]) -> None:
    optimizer, momentum = case
    lr = 0.01 if optimizer == "adam" else 0.1
    serial = laws.reference(size, optimizer=optimizer, momentum=momentum, seed=3, lr=lr)
    for rank in facts(name, size):
        assert close(rank[f"allreduce/{optimizer}/{momentum}"], serial)


@every_engine_and_size
def test_local_sgd_at_every_step_is_allreduce(name: str, size: int) -> None:
    for rank in facts(name, size):
        assert close(rank["local-sgd:every=1"], rank["fit/allreduce"])


@every_engine_and_size
def test_replicas_end_bit_equal(name: str, size: int) -> None:
    first, *others = facts(name, size)
    trained = [k for k in first if k not in ("comm", "mixing")]
    assert len(trained) >= 2 * sum(laws.usable(s, size) for s in strategy)
    for other in others:
        for key in trained:
            assert other[key] is None or other[key] == first[key], key


@every_engine_and_size
def test_the_users_own_loop_is_fit(name: str, size: int) -> None:
    for rank in facts(name, size):
        for s in strategy:
            if laws.usable(s, size) and strategy.make(s).lockstep:
                own, fit = rank[f"own/{s}"], rank[f"fit/{s}"]
                assert (own is None and fit is None) or close(own, fit), s


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("method", ["mutex", "rwlock", "hogwild", "leashed"])
def test_alone_with_the_shared_vector_is_serial(name: str, method: str) -> None:
    """Also with momentum, and in the user's own loop."""
    (rank,) = facts(name, 1)
    assert close(rank[f"fit/{method}"], rank["fit/serial"])
    assert close(rank[f"own/{method}"], rank["fit/serial"])
    assert close(rank[f"momentum/{method}"], rank["momentum/serial"])


@every_engine_and_size
def test_local_sgd_momentum_options_differ_only_with_several_workers(name: str, size: int) -> None:
    rank = facts(name, size)[0]
    kept, averaged, reset = (rank[f"local-sgd/{m}"] for m in ("keep", "average", "reset"))
    assert not close(kept, reset)
    assert close(kept, averaged) == (size == 1)


@every_engine_and_size
@pytest.mark.parametrize("algorithm", ["ring", "halving", "tree"])
def test_a_message_level_all_reduce_is_the_native_one(name: str, size: int, algorithm: str) -> None:
    """Also for vectors shorter than the ring and not divisible by it, and the empty one."""
    for rank in facts(name, size):
        assert close(rank[f"allreduce:algorithm={algorithm}"], rank["fit/allreduce"])
        for length in (0, 1, size - 1, size, 3 * size + 1, 64):
            expected = [sum(math.sin(i + r) for r in range(size)) for i in range(length)]
            assert rank[f"{algorithm}/{length}"] == pytest.approx(expected, abs=1e-12)


@every_engine_and_size
def test_kinds_of_local_sgd_that_are_the_same(name: str, size: int) -> None:
    for rank in facts(name, size):
        assert close(rank["diloco:every=1"], rank["local-sgd:every=1"]), "outer lr 1, no momentum: parameter averaging"
        assert close(rank["post-local"], rank["local-sgd:every=1"]), "post-local before its start: at every step"
        assert close(rank["one-group"], rank["local-sgd/keep"]), "one group of all: no hierarchy"
        assert close(rank["groups-of-one"], rank["every-second"]), "groups of one: local until all average"


@every_engine_and_size
def test_gossip_on_the_complete_graph_is_one_step_of_allreduce(name: str, size: int) -> None:
    """From one common start, the mean over all of x - lr g_i is x - lr mean g."""
    for rank in facts(name, size):
        assert size == 1 or close(rank["complete"], rank["one-step"])


@every_engine_and_size
def test_gossip_keeps_the_mean_and_finds_consensus(name: str, size: int) -> None:
    """Doubly stochastic mixing and push-sum lead every replica to the mean of the first ones."""
    ranks = facts(name, size)
    if size == 1:
        return
    mean = (size - 1) / 2
    if "gossip:kind=adpsgd" in ranks[0]["mixing"]:
        for own, left_with in (rank["mixing"]["gossip:kind=adpsgd"] for rank in ranks):
            assert left_with == pytest.approx(mean)
            assert name != "sim" or own == pytest.approx(mean, abs=0.01 * size), "where all compute equally fast"
    for text in ("gossip:kind=dpsgd", "gossip:kind=sgp", "gossip:graph=exponential"):
        assert [r["mixing"][text][0] for r in ranks] == pytest.approx([(size - 1) / 2] * size, abs=1e-3), text
    for text in laws.TOGETHER:  # these agree, though not on the mean
        values = [r["mixing"][text][0] for r in ranks]
        assert max(values) - min(values) < 0.01
        assert min(values) >= 0 and max(values) <= size - 1


@every_engine_and_size
@pytest.mark.parametrize("text", ["server:mode=sync", "server:mode=sync,servers=2"])
def test_a_synchronous_server_is_allreduce(name: str, size: int, text: str) -> None:
    if not laws.usable(text, size):
        return
    servers = strategy.make(text).server_ranks()
    serial = laws.reference(size - servers, seed=3)
    for rank in facts(name, size)[: size - servers]:
        assert close(rank[text], serial)


@every_engine_and_size
@pytest.mark.parametrize("text", laws.WITHOUT_SLACK)
def test_a_stale_synchronous_server_without_slack_is_synchronous_at_the_n_fold_rate(
    name: str, size: int, text: str
) -> None:
    """Every gradient of a step is in before anyone reads, and is applied in full (Ho 2013)."""
    if not laws.usable(text, size):
        return
    serial = laws.reference(size - 1, laws.EVEN, seed=3, steps=20, lr=0.1)
    for rank in facts(name, size)[: size - 1]:
        assert close(rank[text], serial)


@every_engine_and_size
def test_push_sum_weights_sum_to_the_number_of_workers(name: str, size: int) -> None:
    if size == 1:
        return
    rounds = list(zip(*(rank["mixing"]["weights"] for rank in facts(name, size)), strict=True))
    assert len(rounds) == 40
    for weights in rounds:
        assert sum(weights) == pytest.approx(size)


@every_engine_and_size
def test_comm_does_what_it_says(name: str, size: int) -> None:
    n = size
    for me, rank in enumerate(facts(name, size)):
        found = rank["comm"]
        total = n * (n + 1) / 2
        assert found["sum"] == [i * total for i in range(7)]
        assert found["mean"] == pytest.approx([i * total / n for i in range(7)])
        assert found["max"] == [i * n for i in range(7)]
        assert found["min"] == [float(i) for i in range(7)]
        assert found["overlapped"] == [total] * 3 + [10 * total] * 2
        assert found["all_gather"] == [v for r in range(n) for v in (r, r * r)]
        assert found["reduce_scatter"] == [n * i + n * (n - 1) / 2 for i in (2 * me, 2 * me + 1)]
        assert found["broadcast"] == [n - 1.0] * 4
        group = [r for r in range(n) if r % 2 == me % 2]
        assert found["split"] == [len(group), float(sum(group))]
        pair = [r for r in range(size) if r // 2 == me // 2]
        assert found["split_again"] == [float(sum(pair))] * 3
        if n == 1:
            continue
        left = (me - 1) % n
        assert found["ring"] == [left, "first", [left, -5], [[left, 2.5]], "second"]
        assert found["ring_shapes"] == [[0], [1]]
        if me == 0:
            assert found["anyone"] == list(range(1, n))


@pytest.mark.parametrize("size", [*SIZES, 64])
def test_sim_repeats_bit_for_bit(size: int) -> None:
    """Also with random compute times, where the order of events depends on every draw."""
    chosen = engine.make("sim:compute=lognormal:2ms:0.5,seed=5")
    cases = ["fit/allreduce", "fit/local-sgd"]

    def main(rank: Any) -> dict[str, Any]:
        task = laws.TINY if size * laws.BATCH <= laws.SAMPLES else wide
        run = {
            c: laws.trained(rank, task, laws.spec(size, strategy=c.removeprefix("fit/"), seed=3, epochs=1))
            for c in cases
        }
        return {**run, "clock": rank.clock.now()}

    x, y = laws.tiny_data()
    wide = laws.Task(model=laws.tiny_model, data=lambda: ((x.repeat(20, 1), y.repeat(20)), (x, y)), batch=4, lr=0.1)
    first, again = (chosen.run(main, size, Listener()) for _ in range(2))
    assert first == again
    assert first[0]["clock"] > 0
