"""A model that is made tensor by tensor has the very numbers of one that is made at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import on_threads, three_classes
from torch import Tensor, nn

import hocket
from hocket.core.comm import Rank
from hocket.layouts.blueprint import Blueprint, CannotRecord, blueprint_of
from hocket.layouts.mesh import Layout, Mesh
from hocket.layouts.placing import place


class Various(nn.Module):
    """Layers of many kinds, initialised again by hand, one of them tied."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 8, padding_idx=0)
        self.block = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
        self.image = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.out = nn.Linear(8, 9)
        self.out.weight = self.words.weight
        self.square = nn.Linear(8, 8)
        nn.init.orthogonal_(self.square.weight)
        nn.init.xavier_normal_(self.out.weight)
        self.register_buffer("places", torch.arange(5.0)[:, None] * torch.randn(3))
        with torch.no_grad():
            self.square.weight.mul_(0.5)
            self.square.bias.copy_(torch.randn(8, generator=torch.Generator().manual_seed(3)))


class Hidden(nn.Module):
    """Has a tensor that nobody hears of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(2, 3), torch.zeros(3)


class Curious(nn.Module):
    """Looks at its own values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.scale = self.layer.weight.detach().sum().item()

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.layer(x))


def assert_made_alike(make: Callable[[], nn.Module]) -> None:
    def seeded() -> nn.Module:
        torch.manual_seed(7)
        return make()

    blueprint, after = Blueprint(seeded), torch.rand(3)
    model = seeded()
    assert torch.equal(torch.rand(3), after), "as many random numbers were drawn"
    whole = dict(chain(model.named_parameters(), model.named_buffers()))
    assert blueprint.names == list(whole)
    for name, tensor in reversed(whole.items()):
        found = blueprint.tensor(name)
        assert found.shape == tensor.shape and found.stride() == tensor.stride()
        assert torch.equal(found, tensor)


def test_all_tensors_are_the_same_in_any_order() -> None:
    assert_made_alike(Various)


def test_another_order_in_memory() -> None:
    assert_made_alike(lambda: nn.Sequential(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last))


@settings(max_examples=20)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=6))
def test_dense_layers_of_any_width(widths: list[int]) -> None:
    assert_made_alike(lambda: nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths))))


def test_a_model_has_no_memory_until_its_tensors_are_made() -> None:
    blueprint = Blueprint(lambda: nn.BatchNorm1d(1 << 50))
    assert blueprint.model.weight.is_meta and blueprint.model.running_mean.is_meta


@pytest.mark.parametrize("kind", [Hidden, Curious])
def test_what_needs_values_is_made_at_once(kind: type[nn.Module]) -> None:
    with pytest.raises(CannotRecord):
        blueprint_of(kind)


def test_the_user_is_told_what_is_made_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    task = hocket.Task(model=Curious, data=(three_classes(), three_classes()), batch=10, epochs=1)
    hocket.fit(task, layout="tensor=2", engine="threads")
    assert capfd.readouterr().err.count("every rank makes the whole model before it is split") == 1


def network() -> nn.Module:
    torch.manual_seed(3)
    image = (nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*image, nn.Linear(4 * 6 * 6, 9), nn.ReLU(), nn.Linear(9, 4))


@pytest.mark.parametrize("layout", ["tensor=3", "domain=2", "pipeline=3", "tensor=2,pipeline=2", "tensor=2,data=2"])
def test_the_parts_that_ranks_get_are_those_of_the_whole_model(layout: str) -> None:
    wanted = Layout.parse(layout)
    ranks = wanted.ranks * max(wanted.data, 1)
    blueprint_made = threading.Lock()  # as in a Task: random numbers are drawn from one place

    def main(rank: Rank) -> dict[str, Tensor]:
        with blueprint_made:
            blueprint = Blueprint(network)
        rank.comm.barrier()
        mesh = Mesh(rank.comm, wanted.over(ranks))
        placed = place(blueprint, mesh, mesh.within, torch.device("cpu"), torch.randn(4, 2, 8, 8))
        return dict(placed.portion.tensors())

    found = on_threads(main, ranks)[0]
    expected = network().state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
