"""The user's own PyTorch loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from tiny import on_sim, on_threads
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

import hocket

SAMPLES, EPOCHS = 24, 2
_g = torch.Generator().manual_seed(1)
INPUTS = torch.randn(SAMPLES, 4, generator=_g)
TARGETS = INPUTS @ torch.randn(4, 3, generator=_g)
DATA = TensorDataset(INPUTS, TARGETS)
WEIGHT = torch.randn(3, 4, generator=_g) / 4

Make = Callable[[Iterable[Tensor]], Optimizer]


def sgd(parameters: Iterable[Tensor]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def linear() -> nn.Linear:
    """Without a bias, since Muon takes matrices only."""
    model = nn.Linear(4, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(WEIGHT)
    return model


def train(make: Make, batch: int, *, accumulate: int = 1, closure: bool = False) -> Tensor:
    """A user's loop, on however many ranks there are; the weights that it ends with."""
    with hocket.join() as team:
        model = linear()
        model, optimizer = team.prepare(model, make(model.parameters()))
        loader = team.shard(DATA, batch_size=batch)
        for _ in range(EPOCHS):
            optimizer.zero_grad()
            for number, (inputs, targets) in enumerate(loader, 1):

                def loss(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
                    found = F.mse_loss(model(inputs), targets) / accumulate
                    found.backward()
                    return found

                if closure:
                    assert optimizer.step(loss) is not None
                else:
                    loss()
                    if number % accumulate:
                        continue
                    optimizer.step()
                optimizer.zero_grad()
    return model.weight.detach().clone()


def plain(make: Make) -> Tensor:
    """The same without Hocket, in the order of samples that it chooses."""
    with hocket.join() as team:
        loader = team.shard(DATA, batch_size=8)
    model = linear()
    optimizer = make(model.parameters())
    for _ in range(EPOCHS):
        for inputs, targets in loader:

            def loss(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
                optimizer.zero_grad()
                found = F.mse_loss(model(inputs), targets)
                found.backward()
                return found

            optimizer.step(loss)
    return model.weight.detach()


def optimizers() -> dict[str, Make]:
    """Everything in torch.optim that takes dense gradients."""
    found: dict[str, Make] = {}
    for name, cls in vars(torch.optim).items():
        if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer and name != "SparseAdam":
            options = {"max_iter": 1} if name == "LBFGS" else {}
            found[name] = lambda parameters, cls=cls, options=options: cls(parameters, lr=0.05, **options)
    return found


@pytest.mark.parametrize("name", optimizers())
def test_every_optimizer_on_two_workers_is_the_plain_loop_with_the_double_batch(name: str) -> None:
    make, closure = optimizers()[name], name == "LBFGS"
    expected = plain(make)
    assert torch.equal(train(make, 8, closure=closure), expected), "alone, bit for bit"
    for run in (on_threads, on_sim):
        for weight in run(lambda _: train(make, 4, closure=closure), 2):
            torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-5)
    assert (expected - WEIGHT).abs().max() > 1e-3, "it moved"


def test_all_the_usual_optimizers_are_among_them() -> None:
    assert {"SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "LBFGS"} <= set(optimizers())


def test_gradient_accumulation_is_one_step_on_the_larger_batch() -> None:
    expected = train(sgd, 8)
    torch.testing.assert_close(train(sgd, 4, accumulate=2), expected)
    for weight in on_threads(lambda _: train(sgd, 2, accumulate=2), 2):
        torch.testing.assert_close(weight, expected)


def test_a_gradient_weighs_the_samples_since_the_last_step() -> None:
    """Rank 0 counts 1 + 2 samples and rank 1 counts 1; their gradients are 0 and 4."""

    def main(_: Any) -> float:
        with hocket.join() as team:
            model = nn.Linear(1, 1, bias=False)
            model, optimizer = team.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
            before = model.weight.item()
            for samples in ((1, 2), (1,))[team.rank]:
                team.saw(samples)
            model.weight.grad.fill_(4.0 * team.rank)
            optimizer.step()
            return before - model.weight.item()

    assert on_threads(main, 2) == pytest.approx([1.0, 1.0])


def test_a_closure_is_the_plain_step() -> None:
    for weight in on_threads(lambda _: train(sgd, 4, closure=True), 2):
        torch.testing.assert_close(weight, train(sgd, 8))


class TestScheduler:
    def plain(self) -> Tensor:
        """Without Hocket."""
        with hocket.join() as team:
            loader = team.shard(DATA, batch_size=12)
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(3):
            optimizer.param_groups[0]["lr"] = 0.1 * 0.5**epoch
            for inputs, targets in loader:
                optimizer.zero_grad()
                F.mse_loss(model(inputs), targets).backward()
                optimizer.step()
        return model.weight.detach()

    def train(self, before: bool, strategy: str = "allreduce") -> tuple[Tensor, list[float]]:
        rates = []
        with hocket.join(strategy) as team:
            model = linear()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if before:
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            model, optimizer = team.prepare(model, optimizer)
            if not before:
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            loader = team.shard(DATA, batch_size=12)
            for _ in range(3):
                for inputs, targets in loader:
                    optimizer.zero_grad()
                    F.mse_loss(model(inputs), targets).backward()
                    optimizer.step()
                scheduler.step()
                rates += scheduler.get_last_lr()
        return model.weight.detach().clone(), rates

    @pytest.mark.parametrize(
        "before",
        [True, False],
    )
    def test_made_before_or_after_prepare(self, before: bool) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # PyTorch warns when a scheduler does not see the optimizer's steps
            weight, rates = self.train(before)
        assert rates == [0.05, 0.025, 0.0125]
        torch.testing.assert_close(weight, self.plain())

    def test_steps_that_a_server_takes_count_for_it(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            (_, rates), _ = on_sim(lambda _: self.served(), 2)
        assert rates == [0.05, 0.025, 0.0125]

    def served(self) -> tuple[Tensor, list[float]]:
        try:
            return self.train(True, "server:mode=async")
        except SystemExit:  # the server's script ends inside `prepare`
            return torch.empty(0), []


class TestPrepare:
    def test_the_objects_stay_the_users(self) -> None:
        with hocket.join() as team:
            model = linear()
            optimizer = sgd(model.parameters())
            assert team.prepare(model, optimizer) == (model, optimizer)
            assert optimizer.param_groups[0]["params"] == list(model.parameters())
            assert torch.equal(model.weight, WEIGHT)
            F.mse_loss(model(INPUTS), TARGETS).backward()
            optimizer.step()
            assert list(optimizer.state_dict()["state"]) == [0], "a checkpoint holds the momentum"

    def test_a_loop_that_drops_gradients_to_none(self) -> None:
        """`model.zero_grad` sets `.grad` to None behind the optimizer's back."""

        def main(_: Any) -> Tensor:
            with hocket.join() as team:
                model = linear()
                model, optimizer = team.prepare(model, sgd(model.parameters()))
                for _ in range(EPOCHS):
                    for inputs, targets in team.shard(DATA, batch_size=4):
                        model.zero_grad(set_to_none=True)
                        F.mse_loss(model(inputs), targets).backward()
                        optimizer.step()
            return model.weight.detach().clone()

        first, second = on_threads(main, 2)
        assert torch.equal(first, second) and not torch.equal(first, WEIGHT)

    def test_each_model_once(self) -> None:
        with hocket.join() as team:
            model = linear()
            team.prepare(model, sgd(model.parameters()))
            with pytest.raises(hocket.UserError, match="has this model or optimizer already"):
                team.prepare(model, sgd(model.parameters()))

    def test_lbfgs_with_several_gradients_a_step_is_refused(self) -> None:
        with hocket.join() as team:
            model = linear()
            with pytest.raises(hocket.UserError, match="max_iter=1"):
                team.prepare(model, torch.optim.LBFGS(model.parameters()))

    def test_lbfgs_with_a_line_search_is_refused(self) -> None:
        with hocket.join() as team:
            model = linear()
            with pytest.raises(hocket.UserError):
                team.prepare(model, torch.optim.LBFGS(model.parameters(), max_iter=1, line_search_fn="strong_wolfe"))

    def test_a_step_after_the_end_says_so(self) -> None:
        with hocket.join() as team:
            model = linear()
            _, optimizer = team.prepare(model, sgd(model.parameters()))
        with pytest.raises(hocket.UserError):
            optimizer.step()


class TestShard:
    def seen(self, loader: Iterable[Any]) -> list[float]:
        return [v for (inputs, _) in loader for v in inputs[:, 0].tolist()]

    def test_an_epoch_is_every_sample_once_and_the_next_is_shuffled_anew(self) -> None:
        def main(_: Any) -> list[list[float]]:
            with hocket.join() as team:
                loader = team.shard(DATA, batch_size=4)
                assert len(loader) == 2
                with torch.no_grad():
                    return [self.seen(loader) for _ in range(2)]

        for run in (on_threads, on_sim):
            parts = run(main, 3)
            epochs = [[v for part in parts for v in part[epoch]] for epoch in (0, 1)]
            assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(INPUTS[:, 0].tolist())
            assert epochs[0] != epochs[1]

    def test_a_loop_that_breaks_off_sees_new_samples_the_next_time(self) -> None:
        with hocket.join() as team:
            loader = team.shard(DATA, batch_size=4)
            first, second = (next(iter(loader))[0].tolist() for _ in range(2))
        assert first != second

    def test_validation_between_two_steps_changes_nothing(self) -> None:
        """23 samples for 2 workers of 4: the last step has 4 and 3, so the weights matter."""
        data = TensorDataset(INPUTS[:23], TARGETS[:23])

        def main(validate: bool) -> Tensor:
            with hocket.join() as team:
                model = linear()
                model, optimizer = team.prepare(model, sgd(model.parameters()))
                validation = team.shard(data, batch_size=4)
                for inputs, targets in team.shard(data, batch_size=4):
                    optimizer.zero_grad()
                    F.mse_loss(model(inputs), targets).backward()
                    optimizer.step()
                    if validate:
                        with torch.no_grad():
                            for inputs, _ in validation:
                                model(inputs)
            return model.weight.detach().clone()

        with_it, without = (on_threads(lambda _, v=v: main(v), 2)[0] for v in (True, False))
        assert torch.equal(with_it, without)

    @pytest.mark.parametrize("batch", [0, -1, 9])
    def test_a_batch_that_does_not_fit_the_shard_is_refused(self, batch: int) -> None:
        def main(_: Any) -> str:
            with hocket.join() as team, pytest.raises(hocket.UserError) as caught:
                team.shard(DATA, batch_size=batch)
            return str(caught.value)

        assert (
            on_threads(main, 3) == [f"batch_size must be between 1 and a worker's shard of 8 samples, got {batch}"] * 3
        )

    def test_other_options_reach_the_loader(self) -> None:
        with hocket.join() as team:
            assert list(team.shard(DATA, batch_size=8, collate_fn=len)) == [8, 8, 8]


class TestJoin:
    def test_alone(self) -> None:
        with hocket.join() as team:
            assert (team.rank, team.size, team.bytes_sent) == (0, 1, 0)

    def test_the_strategy_is_checked(self) -> None:
        with pytest.raises(hocket.UserError, match="did you mean allreduce"), hocket.join("alreduce"):
            pass

        def main(_: Any) -> None:
            with pytest.raises(hocket.UserError, match="serial runs 1 worker"), hocket.join("serial"):
                pass

        on_threads(main, 2)

    def test_bytes(self) -> None:
        def main(_: Any) -> int:
            with hocket.join() as team:
                model = linear()
                _, optimizer = team.prepare(model, sgd(model.parameters()))
                for _ in range(3):
                    optimizer.step()
                return team.bytes_sent

        assert sum(on_threads(main, 2)) == 3 * 2 * 4 * (WEIGHT.numel() + 1)

    def test_an_own_error_comes_out_as_it_is(self) -> None:
        with pytest.raises(KeyError, match="mine"), hocket.join() as team:
            model = linear()
            team.prepare(model, sgd(model.parameters()))
            raise KeyError("mine")
