"""Matrix factorization: the compiled gradient equals autograd's, and made-up ratings are found out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_sparse import parameters, share, train, write
from torch.nn import functional as F

from hocket.core.errors import UserError
from hocket.core.replica import Replica
from hocket.kernels.memory.scatter import Touched
from hocket.kernels.memory.words import NEXT
from hocket.kernels.models.factors import FactorKernel, rating_gradient
from hocket.kernels.models.family import DIVERGED, DONE
from hocket.tasks import task
from hocket.tasks.base import SampleSet, compiled, make_task
from hocket.tasks.factorization import Factors

USERS, ITEMS, SAMPLES = 6, 5, 40


def a_problem(rank: int, l2: float) -> tuple[Replica, FactorKernel, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(rank)
    pairs = torch.stack([torch.randint(USERS, (SAMPLES,)), torch.randint(ITEMS, (SAMPLES,))], dim=1)
    samples = pairs, 3 + torch.randn(SAMPLES)
    module = Factors(USERS, ITEMS, rank, 3.0, l2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    model = Replica(module)
    kernel = compiled(module, F.mse_loss, SampleSet(samples, "train"))
    assert isinstance(kernel, FactorKernel) and kernel.dim == len(model.x)
    return model, kernel, samples


@pytest.mark.parametrize("rank", [1, 3, 8])
@pytest.mark.parametrize("l2", [0.0, 0.3])
@pytest.mark.parametrize("chosen", [[5], [0, 7, 7, 20, 39], list(range(SAMPLES))])
def test_the_compiled_gradient_equals_autograd(rank: int, l2: float, chosen: list[int]) -> None:
    model, kernel, (pairs, values) = a_problem(rank, l2)
    expected = F.mse_loss(model.model(pairs[chosen]), values[chosen])
    expected.backward()
    touched = Touched.empty(1000)
    x = model.x.detach().numpy()
    loss, count = rating_gradient(x, kernel.data, np.array(chosen), touched)
    gradient = np.zeros(kernel.dim, np.float32)
    np.add.at(gradient, touched.at[:count], touched.g[:count])
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    np.testing.assert_allclose(gradient, model.g.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(touched.seen[:count], x[touched.at[:count]])


def test_the_penalty_is_on_what_a_rating_depends_on() -> None:
    model, _, (pairs, values) = a_problem(3, 0.3)
    module: Any = model.model
    F.mse_loss(module(pairs[:1]), values[:1]).backward()
    with_penalty = model.g.clone()
    model.g.zero_()
    F.mse_loss(module.eval()(pairs[:1]), values[:1]).backward()
    user, item = pairs[0].tolist()
    expected = torch.zeros_like(model.x)
    layout = model.layout(expected)
    layout["users"][user], layout["items"][item] = 0.3 * module.users[user].data, 0.3 * module.items[item].data
    layout["user_bias"][user], layout["item_bias"][item] = 0.3 * module.user_bias[user], 0.3 * module.item_bias[item]
    torch.testing.assert_close(with_penalty - model.g, expected.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["mutex", "rwlock", "hogwild", "leashed"])
@pytest.mark.parametrize("batch", [1, 7])
def test_one_worker_does_what_plain_sgd_does(method: str, batch: int) -> None:
    model, kernel, (pairs, values) = a_problem(3, 0.1)
    vector = share(kernel, model.x.detach().numpy(), method)
    worker = kernel.worker(0, batch)
    losses = []
    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(SAMPLES)
        vector.control[NEXT] = 0
        assert worker.run_epoch(vector, order, 0.02) == DONE
        for chosen in torch.from_numpy(order).split(batch):
            model.g.zero_()
            loss = F.mse_loss(model.model(pairs[chosen]), values[chosen])
            loss.backward()
            losses.append(float(loss.detach()))
            with torch.no_grad():
                model.x -= 0.02 * model.g
    np.testing.assert_allclose(worker.log.loss, losses[len(losses) // 2 :], rtol=1e-3)
    np.testing.assert_allclose(parameters(vector), model.x.detach().numpy(), rtol=1e-3, atol=1e-5)


def test_a_loss_that_is_not_finite_stops_everyone() -> None:
    _, kernel, _ = a_problem(3, 0.1)
    vector = share(kernel, np.full(kernel.dim, np.inf, np.float32))
    assert kernel.worker(0, 4).run_epoch(vector, np.arange(SAMPLES), 0.1) == DIVERGED


def test_the_made_up_ratings_are_learnt() -> None:
    given = make_task(task.make("factorization"), 0, None)
    assert given.target is not None
    assert train(given) <= given.target


def test_users_and_items_are_numbered_densely(tmp_path: Path) -> None:
    train_file = write(tmp_path / "train", "100 7 1\n-5 7 2\n100 9 3\n")
    test_file = write(tmp_path / "test", "100 8 4\n")
    given = make_task(task.make("factorization:rank=2"), 0, train_file, test_file)
    (pairs, values), (test_pairs, test_values) = (s.take(torch.arange(len(s))) for s in given.load())
    assert pairs.tolist() == [[1, 0], [0, 0], [1, 2]] and values.tolist() == [1, 2, 3]
    assert test_pairs.tolist() == [[1, 1]] and test_values.tolist() == [4]
    model: Any = given.build_model(0)
    assert model.users.shape == (2, 2) and model.items.shape == (3, 2) and float(model.mean) == 2


def test_what_cannot_be_learnt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has only 1 ratings"):
        make_task(task.make("factorization"), 0, write(tmp_path / "one", "1 1 1\n")).load()
    with pytest.raises(UserError, match="--test-data goes with --data"):
        make_task(task.make("factorization"), 0, None, tmp_path)
    for option in ("rank=0", "l2=-1"):
        with pytest.raises(UserError, match="or more"):
            task.make(f"factorization:{option}")
