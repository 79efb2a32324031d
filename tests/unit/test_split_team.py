"""The user's own loop with a model that is split over ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from splitting import apart
from test_layouts import doubled, perceptron
from tiny import on_threads
from torch import Tensor
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
