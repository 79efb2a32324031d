"""Compiled perceptrons: gradients equal autograd's, and one worker does what plain SGD does."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from test_sparse import parameters, run_epoch_of, share
from torch import nn
from torch.nn import functional as F

from hocket.core.replica import Replica
from hocket.kernels.memory.words import NEXT, STOP
from hocket.kernels.models.dense import WEIGHTS, DenseKernel, back_propagate, put_gradient
from hocket.kernels.models.family import DIVERGED, DONE
from hocket.kernels.models.perceptron import widths_of
from hocket.tasks.base import SampleSet, compiled

SAMPLES = 50


def perceptron(widths: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def a_problem(widths: list[int]) -> tuple[Replica, DenseKernel, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(sum(widths))
    model = Replica(perceptron(widths))
    samples = torch.randn(SAMPLES, 1, widths[0]), torch.randint(widths[-1], (SAMPLES,))
    kernel = compiled(model.model, F.cross_entropy, SampleSet(samples, "train"))
    assert isinstance(kernel, DenseKernel) and kernel.dim == len(model.x)
    return model, kernel, samples


@pytest.mark.parametrize("widths", [[4, 3], [1, 1, 2], [7, 5, 3], [20, 16, 16, 16, 10], [784, 128, 10]])
@pytest.mark.parametrize("batch", [1, 2, 16, 33])
def test_the_compiled_gradient_equals_autograd(widths: list[int], batch: int) -> None:
    model, kernel, (inputs, targets) = a_problem(widths)
    chosen = np.random.default_rng(0).permutation(SAMPLES)[:batch]
    expected = F.cross_entropy(model.model(inputs[chosen]), targets[chosen])
    expected.backward()
    values, deltas = (np.full(batch * sum(widths), np.nan, np.float32) for _ in range(2))
    x = model.x.detach().numpy()
    loss = back_propagate(kernel.data, x, x, chosen, values, deltas)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    g = np.full(kernel.dim, np.nan, np.float32)
    put_gradient(kernel.data.plan, batch, values, deltas, 1.0, False, g)
    np.testing.assert_allclose(g, model.g.numpy(), rtol=1e-4, atol=1e-6)
    put_gradient(kernel.data.plan, batch, values, deltas, -0.5, True, g)
    np.testing.assert_allclose(g, 0.5 * model.g.numpy(), rtol=1e-4, atol=1e-6)


def test_what_is_read_twice_is_read_from_the_copy() -> None:
    model, kernel, (inputs, targets) = a_problem([7, 5, 4, 3])
    x, later = model.x.detach().numpy().copy(), model.x.detach().numpy().copy()
    first = int(kernel.data.plan[1, WEIGHTS])
    x[first:], later[:first] = np.nan, np.nan
    values, deltas = (np.zeros(SAMPLES * 19, np.float32) for _ in range(2))
    loss = back_propagate(kernel.data, x, later, np.arange(SAMPLES), values, deltas)
    assert loss == pytest.approx(float(F.cross_entropy(model.model(inputs), targets).detach()), rel=1e-5)
    assert np.isfinite(deltas).all()


def test_large_outputs_do_not_overflow() -> None:
    model, kernel, (inputs, targets) = a_problem([4, 3])
    model.x.data.mul_(1e4)
    values, deltas = np.zeros(SAMPLES * 7, np.float32), np.zeros(SAMPLES * 7, np.float32)
    x = model.x.detach().numpy()
    loss = back_propagate(kernel.data, x, x, np.arange(SAMPLES), values, deltas)
    assert loss == pytest.approx(float(F.cross_entropy(model.model(inputs), targets).detach()), rel=1e-4)
    assert np.isfinite(deltas).all()


@pytest.mark.parametrize("method", ["mutex", "rwlock", "hogwild", "leashed"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("batch", [1, 8])
def test_one_worker_does_what_plain_sgd_does(method: str, momentum: float, batch: int) -> None:
    model, kernel, (inputs, targets) = a_problem([7, 5, 3])
    vector = share(kernel, model.x.detach().numpy(), method)
    worker = kernel.worker(0, batch, momentum)
    optimizer = torch.optim.SGD(model.parameters, lr=0.05, momentum=momentum)
    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(SAMPLES)
        vector.control[NEXT] = 0
        assert worker.run_epoch(vector, order, 0.05) == DONE
        losses = []
        for chosen in torch.from_numpy(order).split(batch):  # 50 is no multiple of 8: the last one is smaller
            model.g.zero_()
            loss = F.cross_entropy(model.model(inputs[chosen]), targets[chosen])
            loss.backward()
            losses.append(float(loss.detach()))
            optimizer.step()
        np.testing.assert_allclose(worker.log.loss, losses, rtol=1e-3)
        assert worker.log.samples.tolist() == [len(c) for c in torch.arange(SAMPLES).split(batch)]
    np.testing.assert_allclose(parameters(vector), model.x.detach().numpy(), rtol=1e-3, atol=1e-5)
    assert vector.statistics().updates == 2 * len(losses)


def test_what_a_worker_keeps_lets_another_go_on() -> None:
    model, kernel, _ = a_problem([7, 5, 3])
    order = np.arange(SAMPLES)

    def epoch(worker: Any, vector: Any) -> None:
        vector.control[NEXT] = 0
        assert worker.run_epoch(vector, order, 0.05) == DONE

    first, vector = kernel.worker(0, 8, 0.9), share(kernel, model.x.detach().numpy())
    epoch(first, vector)
    second, other = kernel.worker(0, 8, 0.9), share(kernel, parameters(vector))
    for name, kept in second.kept().items():
        kept.copy_(first.kept()[name])
    epoch(first, vector)
    epoch(second, other)
    np.testing.assert_array_equal(parameters(other), parameters(vector))
    assert float(second.kept()["velocity"].abs().max()) > 0


@pytest.mark.parametrize("handling", ["inverse", "exponential", "gap", "gap-mean", "delay-compensated"])
def test_fresh_updates_are_not_tempered(handling: Any) -> None:
    model, kernel, _ = a_problem([7, 5, 3])
    x = model.x.detach().numpy()
    plain, tempered = share(kernel, x), share(kernel, x, handling=handling)
    for vector in (plain, tempered):
        kernel.worker(0, 8).run_epoch(vector, np.arange(SAMPLES), 0.05)
    np.testing.assert_allclose(parameters(tempered), parameters(plain), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["mutex", "rwlock", "hogwild", "leashed"])
def test_two_workers_learn_together(method: str) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2_000, 6)
    samples = inputs, inputs[:, :3].argmax(1)
    model = Replica(perceptron([6, 32, 3]))
    kernel = compiled(model.model, F.cross_entropy, SampleSet(samples, "train"))
    assert kernel is not None
    vector = share(kernel, model.x.detach().numpy(), method, workers=2)
    workers = [kernel.worker(w, 16, 0.5) for w in range(2)]
    with kernel.running():
        for epoch in range(10):
            vector.control[NEXT] = 0
            order = np.random.default_rng(epoch).permutation(2_000)
            run_epoch_of(workers, vector, order, 0.1)
    assert sum(int(w.log.samples.sum()) for w in workers) == 2_000
    with torch.no_grad():
        model.x.copy_(torch.from_numpy(parameters(vector)))
        assert float((model.model(inputs).argmax(1) == samples[1]).float().mean()) > 0.9


def test_a_loss_that_is_not_finite_stops_everyone() -> None:
    _, kernel, _ = a_problem([7, 5, 3])
    vector = share(kernel, np.full(kernel.dim, np.nan, np.float32), "leashed")
    worker = kernel.worker(0, 8)
    assert worker.run_epoch(vector, np.arange(SAMPLES), 0.05) == DIVERGED
    assert vector.control[STOP] == 1 and len(worker.log.loss) == 1
    assert vector.references() == [0, 0, 0]


def test_perceptrons_are_recognised_and_others_are_not() -> None:
    assert widths_of(perceptron([4, 8, 3])) == [4, 8, 3]
    assert widths_of(nn.Sequential(nn.Linear(4, 3))) == widths_of(nn.Linear(4, 3)) == [4, 3]
    for other in (
        nn.Sequential(),
        nn.Sequential(nn.Flatten()),
        nn.Sequential(nn.Linear(4, 3), nn.ReLU()),
        nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)),
        nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)),
        nn.Sequential(nn.Linear(4, 3, bias=False)),
        nn.Sequential(nn.Linear(4, 3).double()),
        nn.Sequential(nn.Linear(4, 3).requires_grad_(False)),
        nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU(), nn.Linear(4, 3)),
    ):
        assert widths_of(other) is None


class Negated(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -super().forward(x)


def test_a_model_that_only_looks_like_a_perceptron_is_none() -> None:
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    assert widths_of(nn.Sequential(one, nn.ReLU(), other)) == [4, 4, 4]
    assert widths_of(Negated(one, nn.ReLU(), other)) is None
    assert widths_of(nn.Sequential(one, nn.ReLU(), one)) is None, "two layers with one weight"
    hooked = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    hook = hooked[2].register_forward_hook(lambda module, inputs, output: -output)
    assert widths_of(hooked) is None
    hook.remove()
    assert widths_of(hooked) == [4, 4, 4]
    hooked[0].weight.register_hook(lambda g: 2 * g)
    assert widths_of(hooked) is None
    replaced = nn.Sequential(nn.Linear(4, 4))
    vars(replaced[0])["forward"] = lambda x: x
    assert widths_of(replaced) is None
    before_back = nn.Sequential(nn.Linear(4, 4))
    before_back[0].register_full_backward_pre_hook(lambda module, gradients: None)
    assert widths_of(before_back) is None
    watched = nn.Linear(4, 4)
    watched.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    assert widths_of(watched) is None
    more = nn.Sequential(nn.Linear(4, 4))
    more.register_parameter("scale", nn.Parameter(torch.ones(1)))
    assert widths_of(more) is None
    other.weight = one.weight
    assert widths_of(nn.Sequential(one, nn.ReLU(), other)) is None


def test_only_what_the_kernel_can_do_is_compiled() -> None:
    model = perceptron([4, 3])
    inputs, targets = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    assert DenseKernel.recognise(model, F.cross_entropy, (inputs, targets)) is not None
    assert DenseKernel.recognise(model, F.mse_loss, (inputs, targets)) is None
    assert DenseKernel.recognise(model, nn.CrossEntropyLoss(), (inputs, targets)) is not None
    hooked = nn.CrossEntropyLoss()
    hooked.register_forward_hook(lambda module, inputs, output: -output)
    for changed in (
        hooked,
        nn.CrossEntropyLoss(torch.ones(3)),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(ignore_index=0),
    ):
        assert DenseKernel.recognise(model, changed, (inputs, targets)) is None
    assert DenseKernel.recognise(model, F.cross_entropy, (inputs.double(), targets)) is None
    assert DenseKernel.recognise(model, F.cross_entropy, (inputs[:, :3], targets)) is None
    assert DenseKernel.recognise(model, F.cross_entropy, (inputs, targets + 1)) is None
    assert DenseKernel.recognise(model, F.cross_entropy, torch.utils.data.TensorDataset(inputs, targets)) is None
