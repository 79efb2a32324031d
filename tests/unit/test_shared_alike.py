"""The shared vector in real memory and the simulated one: the same numbers, and both can be taken up again."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, get_args

import pytest
import torch
from tiny import on_sim
from torch import Tensor

from hocket.core.comm import Rank
from hocket.core.sharing import Method, SharedVector, Sharing, Statistics
from hocket.core.staleness import Handling, Staleness
from hocket.core.state import Tensors, decode, encode
from hocket.kernels.memory.vector import MappedVector

METHODS, HANDLINGS = get_args(Method), get_args(Handling)
DIM, WORKERS, LR = 37, 3, 0.1
Script = dict[int, str]
"""Who reads or publishes, one after the other."""


def script(text: str) -> Script:
    return dict(enumerate(text.split()))


def split(whole: Script, at: int) -> tuple[Script, Script]:
    steps = list(whole.items())
    return dict(steps[:at]), dict(steps[at:])


SCRIPT = script(
    "r0 r1 r2 p0 r0 p0 r0 p1 p0 r1 r0 p0 r0 p2 r2 p1 p1 r0 p0 p0 p0 r1 p2 p1 r2 r0 "
    "p1 p1 r1 p0 r0 p0 p2 r2 p2 p2 r1 p1 p0 r0 p1 r1 p2 p0 p0 r0 p1 p2 r1 r2 p0 p2 p1"
)


def gradient(at: int) -> Tensor:
    return torch.randn(DIM, generator=torch.Generator().manual_seed(at))


@dataclass
class Told:
    """What came of a script: the parameters after each operation, each worker's state, and the statistics."""

    after: dict[int, Tensor]
    states: list[dict[str, Any]]
    statistics: Statistics


def act(shared: SharedVector, at: int, kind: str) -> Tensor:
    """Do one operation of a script; the parameters after it."""
    if kind == "r":
        shared.read(torch.empty(DIM))
    else:
        assert shared.publish(gradient(at), LR)
    shared.snapshot(out := torch.empty(DIM))
    return out


def through_json(state: dict[str, Any]) -> Any:
    """The state as it comes back from a file."""
    tensors: Tensors = {}
    text = json.dumps(encode(state, "shared", tensors))
    return decode(json.loads(text), {name: tensor.clone() for name, tensor in tensors.items()})


def in_memory(sharing: Sharing, steps: Script, saved: list[dict[str, Any]] | None = None) -> Told:
    first = MappedVector.create(sharing, gradient(-1))
    workers = [first.seen_by(w) for w in range(WORKERS)]
    for worker, state in zip(workers, saved or [], strict=False):
        worker.load_state(state)
    after = {at: act(workers[int(w)], at, kind) for at, (kind, w) in steps.items()}
    return Told(after, [through_json(worker.state()) for worker in workers], first.statistics())


def in_virtual_time(sharing: Sharing, steps: Script, saved: list[dict[str, Any]] | None = None) -> Told:
    """Operation k of the script begins at k + 1 seconds."""

    def main(rank: Rank) -> tuple[dict[int, Tensor], dict[str, Any], Statistics]:
        me = rank.comm.rank
        shared = rank.comm.share(sharing, gradient(-1))
        if saved is not None:
            shared.load_state(saved[me])
        after = {}
        for at, (kind, w) in steps.items():
            if int(w) == me:
                rank.clock.charge(at + 1 - rank.clock.now())
                after[at] = act(shared, at, kind)
        rank.comm.barrier()
        return after, through_json(shared.state()), shared.statistics()

    found = on_sim(main, WORKERS, compute="1s", memory="1GB", block=5)
    after = {at: x for part, _, _ in found for at, x in part.items()}
    return Told(dict(sorted(after.items())), [state for _, state, _ in found], found[0][2])


def by_the_rules(handling: Handling) -> Told:
    """A server's rules, one set a worker."""
    x, version = gradient(-1), 0
    rules = [Staleness(handling, WORKERS, x) for _ in range(WORKERS)]
    read: dict[int, tuple[int, Tensor]] = {}
    after = {}
    for at, (kind, worker) in SCRIPT.items():
        w = int(worker)
        if kind == "r":
            read[w] = version, x.clone()
        else:
            x = x - LR * rules[w].temper(gradient(at), LR, version - read[w][0], x, read[w][1])
            version += 1
        after[at] = x
    states = [{"staleness": rule.histogram} for rule in rules]
    total = sum((rule.histogram for rule in rules), Counter())
    return Told(after, states, Statistics(version, 0, total, Counter(), 0.0, 0))


@pytest.mark.parametrize("handling", HANDLINGS)
@pytest.mark.parametrize("method", METHODS)
def test_real_and_simulated_memory_and_a_server_temper_alike(method: Any, handling: Any) -> None:
    sharing = Sharing(method, DIM, WORKERS, handling=handling)
    expected = by_the_rules(handling)
    for told in (in_memory(sharing, SCRIPT), in_virtual_time(sharing, SCRIPT)):
        assert told.statistics.staleness == expected.statistics.staleness
        assert told.statistics.updates == expected.statistics.updates
        for own, theirs in zip(told.states, expected.states, strict=True):
            assert own["staleness"] == theirs["staleness"]
        for at, x in expected.after.items():
            torch.testing.assert_close(told.after[at], x, rtol=1e-4, atol=1e-5, msg=f"after {at}: {SCRIPT[at]}")


def test_the_script_tells_one_workers_view_from_all() -> None:
    """Or the test above could not see one `tail` or `gap` that goes by what all workers did."""
    for handling in ("tail", "gap", "gap-mean"):
        told = by_the_rules(handling)
        x, version, read, most = gradient(-1), 0, {}, 0.0
        one = Staleness(handling, WORKERS, x)
        for at, (kind, w) in SCRIPT.items():
            if kind == "r":
                read[w] = version, x
            else:
                x = x - LR * one.temper(gradient(at), LR, version - read[w][0], x, read[w][1])
                version += 1
            most = max(most, float((x - told.after[at]).abs().max()))
        assert most > 0.005


@pytest.mark.parametrize("handling", HANDLINGS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("run", [in_memory, in_virtual_time])
def test_a_vector_is_taken_up_where_it_was_saved(run: Any, method: Any, handling: Any) -> None:
    sharing = Sharing(method, DIM, WORKERS, handling=handling)
    first, second = split(SCRIPT, len(SCRIPT) // 2)
    whole, before = run(sharing, SCRIPT), run(sharing, first)
    rest = run(sharing, second, before.states)
    for at, x in rest.after.items():
        assert torch.equal(x, whole.after[at]), f"after {at}: {SCRIPT[at]}"
    assert rest.statistics.updates == whole.statistics.updates > before.statistics.updates
    assert rest.statistics.staleness == whole.statistics.staleness
    assert rest.statistics.tries == whole.statistics.tries
    assert rest.statistics.peak_vectors == whole.statistics.peak_vectors
    for own, theirs in zip(rest.states, whole.states, strict=True):
        assert own.keys() == theirs.keys()
        assert all(own[name] == theirs[name] for name in ("read_version", "seen", "largest_lr"))
        assert torch.equal(torch.as_tensor(own["mean_square"]), torch.as_tensor(theirs["mean_square"]))


def test_each_of_a_workers_own_numbers_comes_back() -> None:
    """Among them those that no script moves: waits, drops, breaks, the generator for jitter."""
    sharing = Sharing("leashed", DIM, WORKERS)
    saved = MappedVector.create(sharing, gradient(-1)).seen_by(1).state()
    assert {"random", "wait_ns", "dropped", "breaks", "peak", "updates", "read_version", "seen"} <= saved.keys()
    numbers = {name: 100 + i for i, (name, value) in enumerate(saved.items()) if isinstance(value, int)}
    changed = (
        saved
        | numbers
        | {"mean_square": 0.25, "largest_lr": 0.5, "staleness": Counter({2: 3}), "tries": Counter({0: 7})}
    )
    fresh = MappedVector.create(sharing, gradient(-1)).seen_by(1)
    fresh.load_state(changed)
    assert fresh.state() == changed != saved


def test_vectors_that_are_still_read_count_when_a_run_goes_on() -> None:
    """Leashed: worker 1 reads version 0 and worker 2 version 1, while worker 0 makes version 3 of version 2."""
    sharing = Sharing("leashed", DIM, WORKERS)
    first, second = split(script("r1 r0 p0 r2 r0 p0 p0"), 6)
    before = in_virtual_time(sharing, first)
    rest = in_virtual_time(sharing, second, before.states)
    assert before.statistics.peak_vectors == WORKERS + 3
    assert rest.statistics.peak_vectors == WORKERS + 4


class TestContention:
    """Workers that meet in the simulator, save, and go on in another: bit for bit, with every count."""

    def rounds(self, rank: Rank, shared: SharedVector, begin: int, end: int) -> None:
        x = torch.empty(DIM)
        for k in range(begin, end):
            shared.read(x)
            rank.clock.charge(1e-5 + (rank.comm.rank * 5 + k * 3) % 7 / 7e5)
            shared.publish(torch.sin(x + k), LR)

    def main(self, sharing: Sharing, saved: list[Any] | None) -> Any:
        def main(rank: Rank) -> Any:
            shared = rank.comm.share(sharing, gradient(-1))
            if saved is None:
                self.rounds(rank, shared, 0, 10)
            else:
                rank.clock.charge(saved[rank.comm.rank][1] - rank.clock.now())
                shared.load_state(saved[rank.comm.rank][0])
            with rank.clock.free():
                rank.comm.barrier()
            state, now_s = through_json(shared.state()), rank.clock.now()
            rank.clock.charge(rank.comm.rank * 1e-7)  # at one time the last to come to a meeting would go first
            self.rounds(rank, shared, 10, 20)
            rank.comm.barrier()
            shared.snapshot(x := torch.empty(DIM))
            return state, now_s, x, shared.statistics(), rank.clock.now()

        return main

    @pytest.mark.parametrize("handling", ["none", "tail", "gap", "gap-mean"])
    @pytest.mark.parametrize("method", METHODS)
    def test_it_goes_on_to_the_last_bit(self, method: Any, handling: Any) -> None:
        sharing = Sharing(method, DIM, 6, handling=handling, backoff="exponential", backoff_max_s=2e-5, persistence=2)
        options: Any = dict(compute="1s", memory="80MB", block=4)
        whole = on_sim(self.main(sharing, None), 6, **options)
        saved = [(state, now_s) for state, now_s, *_ in whole]
        rest = on_sim(self.main(sharing, saved), 6, **options)
        for (_, began_s, x, statistics, ended_s), (_, again_s, y, others, end_s) in zip(whole, rest, strict=True):
            assert (began_s, ended_s) == (again_s, end_s)
            assert torch.equal(x, y) and x.isfinite().all()
            assert asdict(statistics) == asdict(others)
        statistics = whole[0][3]
        assert statistics.staleness.total() > statistics.staleness[0], "they met"
        if method == "leashed":
            assert statistics.dropped > 0
