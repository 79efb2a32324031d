"""Images that are shared out over ranks: what convolutions, pooling and BatchNorm make of them is what one process
makes of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from splitting import assert_alike, split_gradient
from test_layouts import assert_same
from torch import Tensor, nn

import hocket
from hocket.core.errors import UserError
from hocket.layouts.domain import tiled
from hocket.layouts.mesh import Layout
from hocket.layouts.survey import survey, unconnected

GRIDS = st.sampled_from(["2", "3", "4", "6", "1x2", "2x2", "3x2", "1x3"])


@settings(max_examples=40)
@given(
    grid=GRIDS,
    dtype=st.sampled_from([torch.float32, torch.float64]),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 4)),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    groups=st.sampled_from([1, 2]),
    pool=st.sampled_from(["max", "average", "none"]),
    size=st.tuples(st.integers(22, 27), st.integers(22, 27)),
)
def test_convolutions(
    grid: str, dtype: torch.dtype, kernel: tuple[int, int], stride: int, padding: int, dilation: int, groups: int,
    pool: str, size: tuple[int, int],
) -> None:  # fmt: skip
    torch.manual_seed(kernel[0])
    padding = min(padding, dilation * (min(kernel) - 1) // 2 + 1)
    pools: dict[str, list[nn.Module]] = {
        "max": [nn.MaxPool2d(3, 1, 1)],
        "average": [nn.AvgPool2d((2, 3), 1, (1, 1))],
        "none": [],
    }
    model = nn.Sequential(
        nn.Conv2d(2, 4, kernel, stride, padding, dilation),
        nn.Tanh(),
        nn.BatchNorm2d(4),
        *pools[pool],
        nn.Conv2d(4, 6, 2, 1, "same", groups=groups, bias=False),
        nn.Flatten(),
    )
    whole = model(torch.zeros(1, 2, *size))
    assume(_smallest(model, size) >= 6)
    model = nn.Sequential(*model, nn.Linear(whole.shape[1], 3)).to(dtype)
    ranks = torch.Size(map(int, grid.split("x"))).numel()
    assert_alike(model, torch.randn(3, 2, *size, dtype=dtype), ranks, f"domain={grid}")


def _smallest(model: nn.Module, size: tuple[int, int]) -> int:
    x, smallest = torch.zeros(1, 2, *size), min(size)
    for layer in list(model.children())[:-1]:
        x = layer(x)
        smallest = min(smallest, *x.shape[2:])
    return smallest


@pytest.mark.parametrize(("kernel", "ranks"), [(3, 2), (3, 4), (5, 3), (1, 2), (7, 2)])
def test_only_the_halo_travels(kernel: int, ranks: int) -> None:
    """Gholami 2018: B X_W X_C floor(k/2) a neighbour and way, there and back; 2 (P - 1) |W| for the weights; the image
    once, for all, where it is gathered. Message headers on top."""
    batch, width, channels, out, height = 2, 12, 3, 4, 24
    model = nn.Sequential(
        nn.Conv2d(channels, channels, 1, bias=False),
        nn.Conv2d(channels, out, kernel, padding="same", bias=False),
        nn.Flatten(),
        nn.Linear(out * width * height, 2),
    )
    *_, sent = split_gradient(model, torch.randn(batch, channels, height, width), ranks, f"domain={ranks}")
    halos = 2 * 2 * (ranks - 1) * batch * width * channels * (kernel // 2)
    weights = 2 * (ranks - 1) * (channels * channels + channels * out * kernel**2)
    gathered = (ranks - 1) * batch * out * width * height
    messages = 2 * 2 * (ranks - 1) * (kernel > 1) + ranks * (ranks - 1)
    assert sent == 4 * (halos + weights + gathered) + 48 * messages


def test_batch_norm_goes_on_as_in_one_process() -> None:
    for momentum in (0.1, None):
        model = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3, momentum=momentum, affine=momentum is None), nn.ReLU()
        )
        assert_alike(model.double(), torch.randn(4, 1, 9, 8).double(), 3, "domain=3")


def test_batch_norm_without_a_bias_has_its_weight() -> None:
    norm = nn.BatchNorm2d(3, bias=False)
    nn.init.uniform_(norm.weight, 0.5, 2.0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), norm, nn.ReLU())
    assert_alike(model.double(), torch.randn(4, 1, 9, 8).double(), 2, "domain=2")


@pytest.mark.parametrize(("kernel", "padding", "dilation"), [(9, 4, 1), (5, 4, 2), (2, 1, 3)])
def test_a_halo_larger_than_a_tile(kernel: int, padding: int, dilation: int) -> None:
    """It has parts of several tiles, and some outputs see nothing of their own rank's."""
    model = nn.Sequential(nn.Conv2d(2, 3, kernel, padding=padding, dilation=dilation), nn.Tanh(), nn.Conv2d(3, 2, 3))
    for grid, ranks in (("6", 6), ("3x2", 6), ("1x4", 4)):
        assert_alike(model.double(), torch.randn(2, 2, 9, 10).double(), ranks, f"domain={grid}")


def test_strides_larger_than_the_kernel() -> None:
    """Then there are inputs that nobody needs."""
    model = nn.Sequential(nn.Conv2d(2, 3, 1, stride=3), nn.AvgPool2d(1, 2), nn.Conv2d(3, 2, (2, 1), padding=1))
    assert_alike(model.double(), torch.randn(2, 2, 23, 19).double(), 3, "domain=3")


def test_a_frozen_convolution_sends_no_gradients() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(3, 2, 3)).double()
    model[0].requires_grad_(False)
    x = torch.randn(4, 1, 9, 8).double()
    assert_alike(model, x, 2, "domain=2")
    layers = {layer.name: layer.sent for layer in survey(model, Layout.parse("domain=2"), x)}
    *_, sent = split_gradient(model, x, 2, "domain=2")
    assert sent == sum(layers.values())


def test_one_layer_may_stand_in_several_places() -> None:
    relu, convolution = nn.ReLU(), nn.Conv2d(2, 2, 3, padding=1)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), relu, convolution, relu, convolution, nn.Flatten(), nn.Linear(84, 3))
    x = torch.randn(4, 1, 9, 8).double()
    assert_alike(model.double(), x, 2, "domain=2")
    *_, sent = split_gradient(model, x, 2, "domain=2")
    assert sent == sum(layer.sent for layer in survey(model, Layout.parse("domain=2"), x))


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (nn.Linear(4, 4), "domain=2: a Linear does not say which layers see an image; write the model as an nn.Seq"),
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 4)), r"domain=2: 0 \(Flatten\) cannot work on parts of an image"),
    ],
)
def test_models_without_images_are_refused(model: nn.Module, line: str) -> None:
    with pytest.raises(UserError, match=line):
        tiled(model, unconnected(2), Layout.parse("domain=2"))


def test_an_image_that_is_too_small_is_refused() -> None:
    model = tiled(nn.Sequential(nn.Conv2d(1, 1, 3, stride=2)), unconnected(4), Layout.parse("domain=4"))
    with pytest.raises(UserError, match=r"domain=4x1: 0 \(Conv2d\) gives images of 3x3, too small for 4x1 ranks"):
        model(torch.zeros(1, 1, 8, 8))


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 3, 3), nn.Tanh(),
        nn.Flatten(), nn.Linear(3 * 4 * 3, 3),
    ).double()  # fmt: skip


def images() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(48, 1, 12, 10, generator=g).double()
    return x, x[:, 0, :3].sum(1).argmax(-1) % 3


TASK = hocket.Task(model=small, data=(images(), images()), batch=8, epochs=9, momentum=0.9, lr=0.05)


@pytest.mark.parametrize("optimizer", ["lars", "lamb"])
def test_optimizers_that_look_at_layers_find_whole_ones(optimizer: str) -> None:
    common: dict[str, Any] = {"engine": "threads", "progress": False, "steps": 10, "optimizer": optimizer, "lr": 0.01}
    assert_same(hocket.fit(TASK, layout="domain=2", **common), hocket.fit(TASK, workers=1, **common))


@pytest.mark.parametrize("layout", ["domain=2", "domain=2x2,data=2", "domain=3"])
def test_a_training_with_tiles_learns_as_one_process_does_and_sends_what_was_told(layout: str) -> None:
    common: dict[str, Any] = {"engine": "threads", "progress": False, "steps": 50}
    alone = hocket.fit(TASK, workers=2 if "data" in layout else 1, **common)
    found = hocket.fit(TASK, layout=layout, **common)
    assert_same(found, alone)
    if "data" not in layout:
        told = sum(layer.sent for layer in survey(small(), Layout.parse(layout), images()[0][:8]))
        assert found.bytes_sent == 50 * told


def test_a_task_with_small_images_is_refused_before_it_starts() -> None:
    with pytest.raises(UserError, match=r"domain=5x1: 4 gives images of 4x3, too small for 5x1 ranks; use fewer"):
        hocket.fit(TASK, layout="domain=5", engine="threads", progress=False)
