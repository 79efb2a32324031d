"""What overlap hides, in virtual time to the microsecond; and what a user hears who asks for what cannot be."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import tiny
import torch
from torch import nn
from torch.nn import functional as F

import hocket
from hocket.core.buckets import in_buckets
from hocket.core.errors import UserError
from hocket.core.replica import Part, Replica
from hocket.drivers.joining import join
from hocket.engines.carrier import Carrier

ON = "allreduce:overlap=on,bucket=1"
COMPUTE_S, BYTE_S = 0.010, 1 / 500_000


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)), nn.Linear(16, 2))


def run(text: str, **network: Any) -> hocket.Result:
    made = tiny.task(64, model=lambda: nn.Sequential(nn.Linear(4, 16), deep()), loss=F.cross_entropy, lr=0.1)
    known: dict[str, Any] = {"compute": "10ms", "latency": "0s", "bandwidth": "0.5MB"}
    return tiny.simulated(made, known | network, workers=2, strategy=text)


def buckets() -> list[tuple[Part, slice]]:
    return list(in_buckets(Replica(nn.Sequential(nn.Linear(4, 16), deep())).parts, 256))


def test_a_step_takes_as_long_as_its_last_bucket_needs() -> None:
    """A bucket leaves when it is complete and the wire is free; two workers send its length each. The way back takes
    two thirds of a gradient's time."""
    free_s = 0.0
    for part, span in buckets():
        free_s = max(free_s, (1 + 2 * part.done) / 3 * COMPUTE_S) + 4 * (span.stop - span.start) * BYTE_S
    plain, hidden = run("allreduce"), run(ON)
    wire_s = 4 * plain.parameters * BYTE_S
    assert plain.virtual_seconds == pytest.approx(plain.steps * (COMPUTE_S + wire_s))
    assert hidden.virtual_seconds == pytest.approx(hidden.steps * max(COMPUTE_S, free_s))
    assert hidden.bytes_sent == plain.bytes_sent
    for name, tensor in plain.state.items():
        assert torch.equal(hidden.state[name], tensor)
    for worker in plain.per_worker:
        assert worker["communicating"] == worker["exposed"] == pytest.approx(plain.steps * wire_s)
    for worker in hidden.per_worker:
        assert worker["communicating"] == pytest.approx(hidden.steps * wire_s)
        assert worker["exposed"] == pytest.approx(hidden.steps * (free_s - COMPUTE_S))
        assert worker["computing"] == pytest.approx(hidden.steps * COMPUTE_S)


def test_on_a_fast_network_all_but_the_last_bucket_is_hidden() -> None:
    last = buckets()[-1][1]
    result = run(ON, bandwidth="1GB")
    last_s = 4 * (last.stop - last.start) / 1e9
    assert result.virtual_seconds == pytest.approx(result.steps * (COMPUTE_S + last_s))


def test_who_waits_for_a_straggler_does_not_communicate() -> None:
    result = run(ON, stragglers="1x3", bandwidth="50MB")
    wire_s = 4 * result.parameters / 50e6
    fast, slow = result.per_worker
    for worker in (fast, slow):
        assert worker["communicating"] == pytest.approx(result.steps * wire_s)
    assert fast["waiting"] == pytest.approx(result.steps * 2 * COMPUTE_S, rel=0.05) and slow["waiting"] == 0


def test_buckets_cover_the_gradient_in_the_order_of_backward_and_the_first_is_small() -> None:
    found, parts = buckets(), Replica(nn.Sequential(nn.Linear(4, 16), deep())).parts
    spans = [span for _, span in found]
    assert spans[0].stop == parts[0].span.stop and spans[-1].start == 0
    assert all(a.start == b.stop for a, b in pairwise(spans))
    lengths = [span.stop - span.start for span in spans]
    assert lengths[0] == 34 and all(length >= 256 for length in lengths[1:-1])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"strategy": "allreduce:overlap=on,algorithm=ring"}, "use algorithm=auto or native"),
        ({"strategy": "allreduce:overlap=on,bucket=0"}, "bucket must be 1 KiB or more"),
        ({"strategy": "allreduce:overlap=on", "compress": "int8"}, "leave one of the two out"),
        ({"strategy": "allreduce:overlap=perhaps"}, "overlap"),
    ],
)
def test_what_cannot_overlap_is_refused(settings: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        tiny.fit(tiny.task(), workers=2, **settings)


def loop(case: str) -> None:
    x, y = tiny.samples(8)
    with join(strategy=ON, seed=3) as team:
        model = nn.Linear(4, 2)
        model, optimizer = team.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        F.cross_entropy(model(x), y).backward()
        match case:
            case "twice":
                F.cross_entropy(model(x), y).backward()
            case "changed":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.001)
            case "replaced":
                model.weight.grad = torch.ones_like(model.weight)
            case "weight":
                team.saw(3)
            case "scaled":
                optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
        optimizer.step()


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("twice", "team.no_sync"),
        ("changed", "clip them with team.clip_grad_norm_"),
        ("replaced", "changed between backward and"),
        ("weight", "team.saw came after backward"),
        ("scaled", "GradScaler"),
    ],
)
def test_gradients_that_have_left_stay_as_they_were(case: str, words: str) -> None:
    with pytest.raises(Exception, match=words):
        tiny.on_threads(lambda rank: loop(case), 2)
    tiny.on_threads(lambda rank: loop("well"), 2)


def test_what_goes_wrong_beside_the_rank_is_told_to_who_waits() -> None:
    done: list[int] = []

    def fail() -> None:
        raise ValueError("no")

    carrier = Carrier()
    first, second = carrier.start(fail), carrier.start(lambda: done.append(1))
    with pytest.raises(ValueError, match="no"):
        first.wait()
    second.wait()
    assert done == [1] and first.ended_s <= second.ended_s
