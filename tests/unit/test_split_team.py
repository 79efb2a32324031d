"""The user's own loop with a model that is split over ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from splitting import apart
from test_layouts import doubled, perceptron
from test_team_safety import Inf
from test_tensor_layout import DropsItself
from tiny import on_threads
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hocket
from hocket import UserError
from hocket.core.comm import Rank

CLIP = 0.7


def loop(ranks: int, layout: str, path: Path | None = None, epochs: int = 2, **options: Any) -> dict[str, Tensor]:
    """What rank 0 has in the end."""

    def main(rank: Rank) -> dict[str, Tensor]:
        model = copy.deepcopy(start)
        with hocket.join(layout=layout, **options) as team:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            model, optimizer = team.prepare(model, optimizer)
            loader = team.shard(TensorDataset(*doubled()), 8)
            if path is not None and path.exists():
                team.load(path)
            for _ in range(epochs):
                for x, y in loader:
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    norm = team.clip_grad_norm_(model.parameters(), CLIP)
                    optimizer.step()
                    assert norm > 0
            if path is not None:
                team.save(path)
        return team.state_dict()

    torch.manual_seed(0)
    start = perceptron()  # here, as threads share one generator
    found: dict[str, Tensor] = on_threads(main, ranks)[0]
    return found


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(apart(a[name].double(), b[name].double()) < 1e-9 for name in a)


@pytest.mark.parametrize("strategy", ["allreduce", "local-sgd:every=4"])
def test_a_loop_of_the_users_own_learns_as_with_whole_models(strategy: str) -> None:
    """Gradients are clipped by the norm of the whole model's."""
    whole = loop(2, "", strategy=strategy)
    assert_same(loop(4, "tensor=2,data=2", strategy=strategy), whole)
    assert_same(loop(6, "tensor=3", strategy=strategy), whole)


def test_a_loop_goes_on_with_another_layout(tmp_path: Path) -> None:
    loop(2, "tensor=2", tmp_path / "file", epochs=1)
    assert_same(loop(3, "tensor=3", tmp_path / "file", epochs=1), loop(1, ""))


@pytest.mark.parametrize("strategy", ["allreduce", "diloco:every=3", "gossip"])
def test_what_all_parts_have_stays_alike_under_compression(strategy: str) -> None:
    """Each of them loses something else."""

    def main(rank: Rank) -> dict[str, Tensor]:
        model = copy.deepcopy(start)
        with hocket.join(strategy, layout="tensor=2,data=2", compress="topk:0.2") as team:
            model, optimizer = team.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
            for x, y in team.shard(TensorDataset(*doubled()), 8):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        return {name: p.detach() for name, p in model.named_parameters() if "own" not in name}

    torch.manual_seed(0)
    start = perceptron()
    first, second, *_ = on_threads(main, 4)
    assert len(first) > 2
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_judging_a_split_model_of_several() -> None:
    """`evaluate` sees what one process would; what it says is not counted, and the result is of all ranks."""

    def main(rank: Rank) -> Any:
        models = [copy.deepcopy(model) for model in start]
        with hocket.join(layout=layout) as team:
            pairs = [team.prepare(m, torch.optim.SGD(m.parameters(), lr=0.05)) for m in models]
            for x, y in team.shard(TensorDataset(*doubled()), 8):
                for model, optimizer in pairs:
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
            sent = team.bytes_sent
            loss = team.evaluate(lambda a, b: float(F.cross_entropy(a(doubled()[0]) + b(doubled()[0]), doubled()[1])))
            assert team.bytes_sent == sent
            states = [team.state_dict(model) for model, _ in pairs]
        return loss, states, team.result()

    torch.manual_seed(0)
    start = [perceptron(), perceptron()]
    layout = ""
    alone, whole, of_whole = on_threads(main, 2)[0]
    layout = "tensor=2,data=2"
    loss, states, result = on_threads(main, 4)[0]
    assert loss == pytest.approx(alone)
    for mine, theirs in zip(states, whole, strict=True):
        assert_same(mine, theirs)
    assert (result.workers, result.layout, len(result.per_worker)) == (4, "data=2,tensor=2", 2)
    assert result.parameters == 2 * sum(p.numel() for p in start[0].parameters())
    assert_same(result.state, of_whole.state)


def test_a_model_that_draws_itself_is_refused_when_it_is_called_to_learn() -> None:
    def main(rank: Rank) -> str:
        with hocket.join(layout="tensor=2") as team:
            model = DropsItself()
            model, _ = team.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            model.eval()(doubled()[0].float())
            with pytest.raises(UserError, match="the model draws random numbers itself"):
                model.train()(doubled()[0].float())
        return "refused"

    assert on_threads(main, 2) == ["refused"] * 2


@pytest.mark.parametrize("kind", [1.0, 2.0, float("inf")])
def test_norms_are_those_of_the_whole_model(kind: float) -> None:
    def main(rank: Rank) -> list[float]:
        model = copy.deepcopy(start)
        with hocket.join(layout=layout) as team:
            model, optimizer = team.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
            some = [p for name, p in model.named_parameters() if "bias" in name]
            found = []
            for parameters in (model.parameters(), some):
                optimizer.zero_grad()
                F.cross_entropy(model(doubled()[0]), doubled()[1]).backward()
                norm = team.clip_grad_norm_(parameters, 0.01, kind)
                optimizer.step()
                found.append(float(norm))
        return found

    torch.manual_seed(0)
    start, layout = perceptron(), ""
    expected = on_threads(main, 1)[0]
    layout = "tensor=3"
    assert on_threads(main, 3) == [pytest.approx(expected)] * 3


@pytest.mark.parametrize(
    ("ranks", "layout", "line"),
    [
        (3, "tensor=2", "tensor=2 is not 3 ranks"),
        (2, "pipeline=2", "a pipeline takes its batches apart"),
        (2, "tensor=2,data=2", "data=2 x tensor=2 is not 2 ranks"),
    ],
)
def test_bad_layouts_are_refused(ranks: int, layout: str, line: str) -> None:
    def main(rank: Rank) -> str:
        with pytest.raises(UserError, match=line), hocket.join(layout=layout) as team:
            model = perceptron()
            team.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return "refused"

    assert on_threads(main, ranks) == ["refused"] * ranks


def test_a_scaler_that_skips_on_one_part_skips_on_all_of_its_worker() -> None:
    def main(rank: Rank) -> tuple[int, float]:
        x, y = (tensor.float() if tensor.is_floating_point() else tensor for tensor in doubled())
        with hocket.join("hogwild", layout="tensor=2") as team:
            model = nn.Linear(5, 4)  # the first layer's gradients stay where they are
            model, optimizer = team.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            for number in range(4):
                optimizer.zero_grad()
                loss = Inf.apply(F.cross_entropy(model(x), y), number == 1 and rank.comm.rank == 1)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            return team._prepared[0].session.worker.step, scaler.get_scale()

    assert on_threads(main, 2) == [(3, 2.0)] * 2
