"""A user's own loop cannot go wrong in silence."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny import net, on_sim, on_threads
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hocket
from hocket.core.errors import RankFailed

_g = torch.Generator().manual_seed(1)
INPUTS = torch.randn(24, 4, generator=_g)
TARGETS = INPUTS @ torch.randn(4, 3, generator=_g)
DATA = TensorDataset(INPUTS, TARGETS)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor = INPUTS, targets: Tensor = TARGETS
) -> None:
    optimizer.zero_grad()
    F.mse_loss(model(inputs).float(), targets).backward()
    optimizer.step()


Misuse = Callable[[Any, nn.Sequential, torch.optim.Optimizer], None]


def unfrozen(team: Any, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[0].requires_grad_(True)
    step(model, optimizer)


def frozen(team: Any, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[2].bias.requires_grad_(False)
    step(model, optimizer)


def another_optimizer(team: Any, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    step(model, sgd(model[2]))


def cast(team: Any, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model.double()
    model(INPUTS.double()).sum().backward()
    optimizer.step()


def assigned(team: Any, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict(net().state_dict(), assign=True)
    step(model, optimizer)


def loaded_on_one(team: Any, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    if team.rank == 1:
        with torch.no_grad():
            model[2].weight.add_(1.0)
    step(model, optimizer)


def own_rate(team: Any, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 * (team.rank + 1)
    step(model, optimizer)
    step(model, optimizer)


MISUSES: dict[Misuse, str] = {
    unfrozen: "0.weight was unfrozen or added after team.prepare",
    frozen: "2.bias was frozen after team.prepare",
    another_optimizer: "an optimizer that is not the prepared one steps the prepared model",
    cast: "2.weight was replaced after team.prepare, by a cast",
    assigned: "2.weight was replaced after team.prepare",
    loaded_on_one: "after step 1, 2.weight of rank 1 differs from rank 0's",
    own_rate: "after step 1, 2.weight and 1 more of rank 1 differs from rank 0's",
}


@pytest.mark.parametrize("misuse", MISUSES, ids=lambda misuse: misuse.__name__)
@pytest.mark.parametrize("run", [on_threads, on_sim])
def test_misuse_is_said_in_one_line(misuse: Misuse, run: Callable[..., Any]) -> None:
    def main(_: Any) -> None:
        with hocket.join() as team:
            model = net()
            model[0].requires_grad_(False)
            misuse(team, *team.prepare(model, sgd(model)))

    with pytest.raises(RankFailed) as caught:
        run(main, 2)
    assert f"UserError: {MISUSES[misuse]}" in str(caught.value) and "\n" not in str(caught.value)


def test_shard_without_prepare() -> None:
    def main(_: Any) -> None:
        model = net()
        optimizer = sgd(model)
        with hocket.join() as team:
            for inputs, targets in team.shard(DATA, batch_size=4):
                step(model, optimizer, inputs, targets)

    with pytest.raises(RankFailed, match=r"each worker trained alone; call team\.prepare"):
        on_threads(main, 2)


def test_a_prepared_optimizer_that_never_steps() -> None:
    def main(_: Any) -> None:
        model, other = net(), net()
        optimizer = sgd(other)
        with hocket.join() as team:
            team.prepare(model, sgd(model))
            for inputs, targets in team.shard(DATA, batch_size=4):
                step(other, optimizer, inputs, targets)

    with pytest.raises(RankFailed, match="step with the prepared optimizer"):
        on_threads(main, 2)


def test_the_optimizer_of_another_model_is_refused() -> None:
    with hocket.join() as team, pytest.raises(hocket.UserError, match="parameters that the model has not"):
        team.prepare(net(), sgd(net()))


def test_validation_alone_needs_no_prepare() -> None:
    def main(_: Any) -> float:
        with hocket.join() as team, torch.no_grad():
            return team.all_reduce(sum(float(x.sum()) for x, _ in team.shard(DATA, batch_size=4)))

    assert on_threads(main, 2) == pytest.approx([float(INPUTS.sum())] * 2, rel=1e-4)


def test_rank_0_alone_has_loaded_a_checkpoint() -> None:
    """Weights and momentum of rank 0 reach all."""
    model = net()
    optimizer = sgd(model)
    step(model, optimizer)
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    step(model, optimizer)

    def main(_: Any) -> Tensor:
        mine = net()
        its = sgd(mine)
        with hocket.join() as team:
            if team.rank == 0:
                mine.load_state_dict(saved["model"])
                its.load_state_dict(saved["optimizer"])
            team.prepare(mine, its)
            step(mine, its)
        return mine[0].weight.detach()

    for weight in on_threads(main, 3):
        torch.testing.assert_close(weight, model[0].weight.detach())


class TestLeaving:
    def leave(self, how: Callable[[], None]) -> str:
        def main(_: Any) -> None:
            with hocket.join() as team:
                model = net()
                _, optimizer = team.prepare(model, sgd(model))
                for number in range(6):
                    if number == 4 and team.rank == 1:
                        how()
                        break
                    step(model, optimizer)

        with pytest.raises(RankFailed) as caught:
            on_threads(main, 2)
        assert "DeadlineExceeded" not in caught.value.traceback, "it is noticed at once"
        return str(caught.value)

    def test_by_a_break(self) -> None:
        assert "rank 1 has left the block after 4 steps, and others have not" in self.leave(lambda: None)

    def test_by_an_exit(self) -> None:
        def leave() -> None:
            raise SystemExit(0)

        assert "rank 1 has left the block after 4 steps" in self.leave(leave)

    def test_all_may_exit(self) -> None:
        def main(_: Any) -> None:
            with hocket.join() as team:
                model = net()
                _, optimizer = team.prepare(model, sgd(model))
                step(model, optimizer)
                raise SystemExit(0)

        with pytest.raises(RankFailed, match="SystemExit: 0"):  # which `hocket launch` takes for a good end
            on_threads(main, 2)


class TestRandomness:
    def drawn(self, seed: int) -> list[list[float]]:
        def main(_: Any) -> list[float]:
            torch.manual_seed(0)
            with hocket.join(seed=seed) as team:
                model = net()
                team.prepare(model, sgd(model))
                team.barrier()
                import random

                return [float(torch.rand(())), float(np.random.rand()), random.random()]

        return on_sim(main, 3)

    def test_differs_by_rank_and_repeats_by_seed(self) -> None:
        first, again, other = self.drawn(0), self.drawn(0), self.drawn(1)
        assert first == again
        assert not {v for row in first for v in row} & {v for row in other for v in row}


class Inf(torch.autograd.Function):
    """A gradient that is infinite on demand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, infinite: bool) -> Tensor:
        ctx.infinite = infinite
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * float("inf") if ctx.infinite else grad, None


@pytest.mark.parametrize("strategy", ["allreduce", "local-sgd:every=2", "gossip:kind=dpsgd"])
def test_a_scaler_that_skips_on_one_rank_skips_on_all(strategy: str) -> None:
    def main(_: Any) -> tuple[int, Tensor, float]:
        with hocket.join(strategy) as team:
            model = net()
            _, optimizer = team.prepare(model, sgd(model))
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
            for number in range(4):
                optimizer.zero_grad()
                loss = F.mse_loss(model(INPUTS), TARGETS)
                scaler.scale(Inf.apply(loss, number == 1 and team.rank == 1)).backward()
                scaler.step(optimizer)
                scaler.update()
            return team._prepared[0].session.worker.step, model[0].weight.detach().clone(), scaler.get_scale()

    def plain() -> Tensor:
        model = net()
        optimizer = sgd(model)
        for _ in range(3):
            step(model, optimizer)
        return model[0].weight.detach()

    for steps, weight, scale in on_threads(main, 2):
        assert (steps, scale) == (3, 4.0), "halved at the overflow, and doubled after two steps without one"
        torch.testing.assert_close(weight, plain())


def test_a_scaler_with_a_clip_of_the_averaged_gradient() -> None:
    """unscale_, then clip, as PyTorch's page on mixed precision has it."""

    def main(_: Any) -> Tensor:
        with hocket.join() as team:
            model = net()
            _, optimizer = team.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
            scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
            scaler.scale(F.mse_loss(model(INPUTS), TARGETS)).backward()
            scaler.unscale_(optimizer)
            norm = team.clip_grad_norm_(model.parameters(), 0.01)
            before = torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])
            scaler.step(optimizer)
            assert norm > 0.01
            return (torch.cat([p.detach().reshape(-1) for p in model.parameters()]) - before).norm()

    for moved in on_threads(main, 2):
        torch.testing.assert_close(moved, torch.tensor(0.01), rtol=1e-3, atol=0)


class TestTheModelStaysTheUsers:
    def test_a_state_dict_saves_its_own_bytes(self) -> None:
        def size(state: Any) -> int:
            file = io.BytesIO()
            torch.save(state, file)
            return len(file.getvalue())

        with hocket.join() as team:
            model = nn.Sequential(nn.Linear(300, 300), nn.Linear(3, 2))
            team.prepare(model, sgd(model))
            inside, whole = size(model[1].state_dict()), size(model.state_dict())
            assert model.state_dict(keep_vars=True)["1.weight"] is model[1].weight
        plain = nn.Sequential(nn.Linear(300, 300), nn.Linear(3, 2))
        assert inside == size(plain[1].state_dict()) and whole == size(plain.state_dict())
        assert size(model[1].state_dict()) == inside, "after the block too"
        assert model[1].weight.untyped_storage().nbytes() == 24, "which gives the memory back"

    def test_channels_last_is_kept(self) -> None:
        images = torch.randn(6, 4, 5, 5, generator=torch.Generator().manual_seed(2))

        def made() -> nn.Conv2d:
            torch.manual_seed(0)
            return nn.Conv2d(4, 6, 3)  # one rank alone

        def train(model: nn.Conv2d, optimizer: torch.optim.Optimizer) -> Tensor:
            for _ in range(3):
                optimizer.zero_grad()
                model(images).square().mean().backward()
                optimizer.step()
            return model.weight.detach()

        plain = made()
        expected = train(plain, sgd(plain))
        with hocket.join() as team:
            model = made().to(memory_format=torch.channels_last)
            found = train(*team.prepare(model, sgd(model)))
            assert model.weight.is_contiguous(memory_format=torch.channels_last)
            assert model.weight.grad is not None
            assert model.weight.grad.is_contiguous(memory_format=torch.channels_last)
            torch.testing.assert_close(found, expected)

    def test_parameters_of_several_types(self) -> None:
        def made() -> nn.Sequential:
            model = net()
            model[2].to(torch.bfloat16)
            return nn.Sequential(model[0], model[1], Cast(), model[2])

        def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
            for _ in range(4):
                step(model, optimizer)
            return [p.detach().clone() for p in model.parameters()]

        plain = made()
        expected = train(plain, sgd(plain))

        def main(_: Any) -> list[Tensor]:
            with hocket.join() as team:
                model = made()
                return train(*team.prepare(model, sgd(model)))

        for found in (*on_threads(main, 2), *on_sim(main, 3)):
            for mine, its in zip(found, expected, strict=True):
                assert mine.dtype == its.dtype
                torch.testing.assert_close(mine, its, rtol=1e-2, atol=1e-2)


class Cast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16)
