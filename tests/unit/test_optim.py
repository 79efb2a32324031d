"""Optimizers by name, on the flat vector."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hocket
from hocket import optim
from hocket.core.errors import UserError
from hocket.core.replica import Replica
from hocket.drivers.plan import Plan
from hocket.drivers.schedule import Schedule
from hocket.optim.large_batch import LAMB, LARS
from hocket.run.resolve import resolve
from hocket.run.spec import RunSpec


def model() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def trained(steps: int, step_with_torch: bool, text: str, momentum: float) -> torch.Tensor:
    flat = Replica(model())
    optimizer = optim.make(text, flat, 0.1, momentum)
    step = optimizer.step if step_with_torch else optim.step_of(optimizer)
    for i in range(steps):
        flat.g.copy_(torch.sin(torch.arange(flat.g.numel()) + i) + 0.1 * flat.x)
        step()
    return flat.x.clone()


@settings(max_examples=60)
@given(
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    decay=st.sampled_from([0.0, 0.01]),
    dampening=st.sampled_from([0.0, 0.3]),
    nesterov=st.booleans(),
    maximize=st.booleans(),
)
def test_the_short_step_of_sgd_is_torchs(
    momentum: float, decay: float, dampening: float, nesterov: bool, maximize: bool
) -> None:
    nesterov = nesterov and momentum > 0 and dampening == 0  # torch refuses the rest
    text = f"sgd:weight_decay={decay},dampening={dampening},nesterov={nesterov},maximize={maximize}"
    assert trained(5, True, text, momentum).equal(trained(5, False, text, momentum))


@pytest.mark.parametrize("name", optim.ELEMENTWISE)
def test_one_flat_parameter_is_many_shaped_ones(name: str) -> None:
    """Why an optimizer may run on the flat vector: its rule is elementwise."""
    reference = model()
    cls = optim.ELEMENTWISE[name]
    shaped = cls(reference.parameters(), lr=0.1)
    for i in range(4):
        flat_gradient = torch.sin(torch.arange(26.0) + i)
        at = 0
        for p in reference.parameters():
            p.grad = flat_gradient[at : at + p.numel()].view_as(p).clone()
            at += p.numel()
        shaped.step()

    flat = Replica(model())
    optimizer = optim.make(name, flat, 0.1, 0.0)
    for i in range(4):
        flat.g.copy_(torch.sin(torch.arange(26.0) + i))
        optim.step_of(optimizer)()
    expected = torch.cat([p.detach().reshape(-1) for p in reference.parameters()])
    torch.testing.assert_close(flat.x, expected)


def test_lars_by_hand() -> None:
    """v <- m v + lr eta |w| / (|g| + b |w|) (g + b w) for matrices, plain momentum for vectors, 1 for zeros."""
    w, b, zero = (nn.Parameter(t) for t in (torch.tensor([[3.0, 4.0]]), torch.tensor([1.0]), torch.zeros(1, 2)))
    w.grad, b.grad, zero.grad = torch.tensor([[0.0, 2.0]]), torch.tensor([0.5]), torch.tensor([[1.0, 0.0]])
    optimizer = LARS([w, b, zero], lr=2.0, momentum=0.5, weight_decay=0.1, eta=0.01)
    optimizer.step()
    rate = 2.0 * 0.01 * 5.0 / (2.0 + 0.1 * 5.0)
    v = rate * torch.tensor([[0.3, 2.4]])
    torch.testing.assert_close(w.data, torch.tensor([[3.0, 4.0]]) - v)
    torch.testing.assert_close(b.data, torch.tensor([1.0 - 2.0 * 0.5]))
    torch.testing.assert_close(zero.data, torch.tensor([[-2.0, 0.0]]))
    before = b.data.clone()
    optimizer.step()
    torch.testing.assert_close(b.data, before - (0.5 * 1.0 + 2.0 * 0.5))


def test_lamb_by_hand() -> None:
    """The first step: u = sign(g) + decay w, as long as w."""
    w, b = nn.Parameter(torch.tensor([[3.0, 4.0]])), nn.Parameter(torch.tensor([1.0]))
    w.grad, b.grad = torch.tensor([[0.5, -2.0]]), torch.tensor([4.0])
    LAMB([w, b], lr=0.1, eps=0.0, weight_decay=0.1).step()
    u = torch.tensor([[1.0 + 0.3, -1.0 + 0.4]])
    torch.testing.assert_close(w.data, torch.tensor([[3.0, 4.0]]) - 0.1 * 5.0 * u / u.norm())
    torch.testing.assert_close(b.data, torch.tensor([0.9]))


@pytest.mark.parametrize("name", optim.LAYERWISE)
def test_layerwise_optimizers_run_under_a_strategy(name: str) -> None:
    text = "lars:eta=0.02" if name == "lars" else name
    result = hocket.fit(
        "digits", strategy="local-sgd:every=4,momentum=average", engine="sim", workers=3, optimizer=text,
        lr=1.0 if name == "lars" else 0.02, warmup=2, epochs=20, progress=False,
    )  # fmt: skip
    assert result.test_accuracy is not None
    assert result.test_accuracy > 0.9


def plan(**settings: Any) -> Plan:
    return resolve(RunSpec("tiny", **settings), tiny.task(), 24)


def test_linear_scaling_and_warm_up() -> None:
    flat = Replica(model())
    optimizer = optim.make("sgd", flat, 0.1, 0.0)
    rate = Schedule(plan(workers=4, lr=0.1, scale_lr=True, warmup=2), optimizer, steps_per_epoch=5)
    seen = []
    for step in range(1, 14):
        rate.set(step)
        seen.append(optimizer.param_groups[0]["lr"])
    assert seen[:10] == pytest.approx([0.1 + 0.03 * step for step in range(1, 11)])
    assert seen[10:] == pytest.approx([0.4] * 3)
    Schedule(plan(workers=4, lr=0.1, scale_lr=True), optimizer, 5)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.4)
    Schedule(plan(workers=4, lr=0.1), optimizer, 5)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_the_rate_decays_from_epoch_to_epoch() -> None:
    optimizer = optim.make("sgd", Replica(model()), 0.1, 0.0)
    rate = Schedule(plan(workers=1, lr=0.1, lr_decay=0.5), optimizer, steps_per_epoch=3)
    assert [rate.at(step) for step in range(1, 8)] == pytest.approx([0.1] * 3 + [0.05] * 3 + [0.025])


def test_the_short_step_follows_a_state_that_is_loaded() -> None:
    """Loading replaces groups and state; the rate set afterwards counts, and so does the velocity."""
    saved = optim.make("sgd", Replica(model()), 0.1, 0.9).state_dict()
    flat = Replica(model())
    optimizer = optim.make("sgd", flat, 0.1, 0.9)
    step = optim.step_of(optimizer)
    saved["state"] = {0: {"momentum_buffer": torch.full_like(flat.x, 10.0)}}
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["lr"] = 0.5
    before = flat.x.clone()
    flat.g.fill_(1.0)
    step()
    torch.testing.assert_close(flat.x, before - 0.5 * (0.9 * 10.0 + 1.0))
    assert optimizer.state_dict()["state"][0]["momentum_buffer"].allclose(torch.tensor(10.0))


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_every_option_is_refused_where_it_would_fail_later(name: str) -> None:
    """What is accepted trains without an error, at the ends of its range too."""
    for key, default in optim.settings(name).items():
        for value in ["true", "false"] if isinstance(default, bool) else ["-1", "1e308", "nan", "1", "0", "0.5", ""]:
            flat = Replica(model())
            flat.g.fill_(0.1)
            try:
                step = optim.step_of(optim.make(f"{name}:{key}={value}", flat, 0.1, 0.0))
            except UserError as error:
                assert "\n" not in str(error)
                continue
            assert value not in ("-1", "1e308", "nan", ""), f"{name}:{key}={value} was accepted"
            for _ in range(3):
                step()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lamb:eps=-1", "lamb: eps must be at least 0 and less than 1e\\+35; got -1"),
        ("lamb:beta2=1", "beta2 must be at least 0 and less than 1; got 1"),
        ("sgd:dampening=-1", "dampening must be"),
        ("adam:capturable=true", "no option of optimizer adam is called 'capturable'"),
        ("adam:differentiable=true", "no option of optimizer adam is called 'differentiable'"),
        ("adam:eps", "option eps needs a value; write eps=VALUE"),
        ("adam:eps=" + "9" * 400, "eps must be finite; got '999"),
        ("sgd:nesterov=true", "optimizer sgd:nesterov=true: Nesterov"),
    ],
)
def test_bad_options_are_one_line(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        optim.make(text, Replica(model()), 0.1, 0.0)


def test_momentum_is_not_dropped_without_a_word() -> None:
    with pytest.raises(UserError, match="optimizer adam takes no momentum"):
        optim.make("adam", Replica(model()), 0.1, 0.9)


@pytest.mark.parametrize("lr", [0.0, -1.0, 1e308, float("nan")])
def test_rates_that_the_parameters_cannot_hold(lr: float) -> None:
    with pytest.raises(UserError, match="lr must be greater than 0 and less than"):
        optim.make("sgd", Replica(model()), lr, 0.0)


@pytest.mark.parametrize("name", [n for n in optim.OPTIMIZERS if optim.takes_momentum(n)])
def test_no_momentum_is_none(name: str) -> None:
    """Also where the optimizer's own default is another: the run's record says 0."""
    assert optim.make(name, Replica(model()), 0.1, 0.0).param_groups[0]["momentum"] == 0.0


@functools.cache
def accuracy(optimizer: str | None) -> float:
    result = hocket.fit("digits", strategy="serial", engine="sim", optimizer=optimizer, progress=False, trace=0)
    assert result.test_metric is not None
    return result.test_metric


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_another_optimizer_than_the_tasks_begins_with_a_rate_of_its_own(name: str) -> None:
    """Within 2.5 points of the task's own, which is a rate for momentum SGD: 0.1 with LAMB ends at 0.10."""
    assert accuracy(name) > accuracy(None) - 0.025


def test_what_is_said_counts_more_than_an_optimizers_own_rate() -> None:
    own = resolve(RunSpec("digits"), tiny.task(lr=0.7, momentum=0.6), 24)
    assert (own.lr, own.momentum) == (0.7, 0.6)
    nesterov = resolve(RunSpec("digits", optimizer="sgd:nesterov=true"), tiny.task(lr=0.7, momentum=0.6), 24)
    assert (nesterov.lr, nesterov.momentum) == (0.7, 0.6), "it is the task's, with an option"
    lars = resolve(RunSpec("digits", optimizer="lars"), tiny.task(lr=0.7, momentum=0.6), 24)
    assert (lars.lr, lars.momentum) == (1.0, 0.9)
    given = resolve(RunSpec("digits", optimizer="lars", lr=3.0, momentum=0.0), tiny.task(lr=0.7, momentum=0.6), 24)
    assert (given.lr, given.momentum) == (3.0, 0.0)
    assert set(optim.RATES) == set(optim.OPTIMIZERS)


FIRST_STEPS = """
import sys, torch
from hocket import optim
from hocket.optim.schedules import Rates
x = torch.zeros(4)
step = optim.step_of(optim.make_flat({name!r}, x, torch.ones(4), 0.1, 0.0))
rates = Rates("cosine-annealing", {name!r}, 0.1, 0.0, 4, None)
before = "torch._dynamo" in sys.modules
step()
assert x.any() and rates.at(2)["lr"] < 0.1
assert before == ("torch._dynamo" in sys.modules)
"""


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_the_first_step_loads_nothing_that_would_count_as_computing(name: str) -> None:
    """torch.compile takes seconds to import, and a fresh process has it only where a step needs it."""
    subprocess.run([sys.executable, "-c", FIRST_STEPS.format(name=name)], check=True, timeout=120)
