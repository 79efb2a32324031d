"""Several models in a user's own loop, each with an optimizer of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_team_loops import DATA, sgd
from tiny import net, on_threads
from torch import Tensor
from torch.nn import functional as F

import hocket
from hocket.core.errors import RankFailed


def test_two_models_with_an_optimizer_each() -> None:
    """As in a GAN: each batch counts for a step of both."""

    def main(_: Any) -> list[Tensor]:
        with hocket.join() as team:
            first, second = net(), net()
            team.prepare(first, sgd(first))
            pairs = [(first, team._prepared[0].optimizer), team.prepare(second, sgd(second, lr=0.1))]
            for inputs, targets, _ in team.shard(DATA, batch_size=5 * 2 // team.size):
                for model, optimizer in pairs:
                    optimizer.zero_grad()
                    F.mse_loss(model(inputs), targets).backward()
                    optimizer.step()
        return [first[0].weight.detach(), second[0].weight.detach()]

    (alone,) = on_threads(main, 1)
    for both in on_threads(main, 2):
        for mine, its in zip(both, alone, strict=True):
            torch.testing.assert_close(mine, its)
    assert not torch.equal(*alone)


def test_servers_serve_one_model() -> None:
    def main(_: Any) -> None:
        with hocket.join("server") as team:
            for _ in range(2):
                model = net()
                team.prepare(model, sgd(model))

    with pytest.raises(RankFailed, match="servers serve one model"):
        on_threads(main, 2)


def test_two_models_are_saved_and_go_on(tmp_path: Any) -> None:
    def main(epochs: tuple[int, int], file: str) -> Callable[[Any], list[Tensor]]:
        def run(_: Any) -> list[Tensor]:
            with hocket.join("local-sgd:every=2", seed=1) as team:
                models = [net(), net()]
                rates = zip(models, (0.01, 0.02), strict=True)
                pairs = [team.prepare(model, torch.optim.Adam(model.parameters(), lr=lr)) for model, lr in rates]
                loader = team.shard(DATA, batch_size=5)
                if epochs[0]:
                    assert team.load(tmp_path / file) == {"epoch": epochs[0]}
                for _ in range(*epochs):
                    for inputs, targets, _ in loader:
                        for model, optimizer in pairs:
                            optimizer.zero_grad()
                            F.mse_loss(model(inputs), targets).backward()
                            optimizer.step()
                if epochs[1] < 4:
                    team.save(tmp_path / file, epoch=epochs[1])
                return [model[0].weight.detach().clone() for model in models]

        return run

    whole = on_threads(main((0, 4), "none"), 2)
    on_threads(main((0, 2), "half"), 2)
    rest = on_threads(main((2, 4), "half"), 2)
    for a, b in zip(whole, rest, strict=True):
        assert all(map(torch.equal, a, b))
