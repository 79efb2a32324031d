"""A model whose layers are shared out between ranks computes what one process computes."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from splitting import apart, assert_alike, counted, loss_of, split_gradient
from tiny import on_threads, three_classes
from torch import Tensor, nn
from torch.nn import functional as F

import hocket
from hocket.core.comm import Rank
from hocket.core.errors import UserError
from hocket.layouts.dropout import check_dropout, drop_alike
from hocket.layouts.mesh import Layout
from hocket.layouts.split import ByHeads, ByInputs, ByOutputs, Split
from hocket.layouts.survey import check
from hocket.layouts.tensor import split
from hocket.measure.meter import Metered

RANKS = st.sampled_from([2, 3, 4, 6])
DTYPES = st.sampled_from([torch.float32, torch.float64])


@settings(max_examples=25)
@given(ranks=RANKS, dtype=DTYPES, widths=st.lists(st.integers(6, 17), min_size=2, max_size=5), batch=st.integers(1, 5))
def test_perceptron(ranks: int, dtype: torch.dtype, widths: list[int], batch: int) -> None:
    torch.manual_seed(sum(widths))
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after, bias=after % 2 == 0), nn.Tanh()]
    model = nn.Sequential(*layers, nn.LayerNorm(widths[-1])).to(dtype)
    assert_alike(model, torch.randn(batch, widths[0], dtype=dtype), ranks, f"tensor={ranks}")


@settings(max_examples=25)
@given(
    ranks=RANKS,
    dtype=DTYPES,
    channels=st.integers(6, 9),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    grouped=st.booleans(),
    mode=st.sampled_from(["zeros", "reflect", "circular"]),
)
def test_convolutions(
    ranks: int, dtype: torch.dtype, channels: int, kernel: int, stride: int, padding: int, dilation: int,
    grouped: bool, mode: str,
) -> None:  # fmt: skip
    torch.manual_seed(channels + kernel)
    model = nn.Sequential(
        nn.Conv2d(3, channels, kernel, stride, padding, dilation, padding_mode=mode),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 1, groups=channels if grouped else 1),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * channels, 7),
    ).to(dtype)
    assert_alike(model, torch.randn(3, 3, 18, 17, dtype=dtype), ranks, f"tensor={ranks}")


class Block(nn.Module):
    """Words, a transformer's layer, and a word at every place."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(11, width, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(width, heads, 3 * width, dropout=0.0, batch_first=True)
        self.out = nn.Linear(width, 11)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=self.out_dtype)
        hidden = self.layer(
            self.words(x),
            src_mask=mask,
            src_key_padding_mask=torch.zeros_like(x, dtype=mask.dtype).masked_fill(x == 10, float("-inf")),
        )
        y: Tensor = self.out(hidden)
        return y

    @property
    def out_dtype(self) -> torch.dtype:
        return self.layer.norm1.weight.dtype


@settings(max_examples=12)
@given(ranks=RANKS, dtype=DTYPES, more=st.integers(0, 2))
def test_transformer_block(ranks: int, dtype: torch.dtype, more: int) -> None:
    torch.manual_seed(more)
    heads = ranks + more  # so that some ranks have one head more than others
    x = torch.randint(0, 10, (2, 5))
    x[0, -1] = 10
    assert_alike(Block(heads, 2 * heads).to(dtype), x, ranks, f"tensor={ranks}")


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("averaged", [False, True])
def test_attention_with_other_keys_and_its_weights(batch_first: bool, averaged: bool) -> None:
    layer = nn.MultiheadAttention(6, 3, batch_first=batch_first, kdim=5, vdim=4).double()
    g = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(3, 3, n, generator=g).double() for n in (6, 5, 4))
    mask = torch.rand(9, 3, 3, generator=g) > 0.7
    mask[:, :, 0] = False
    expected = layer(query, key, value, attn_mask=mask, average_attn_weights=averaged)

    def main(rank: Rank) -> tuple[Tensor, Tensor]:
        own = split(copy.deepcopy(layer), rank.comm)
        out, weights = own(query, key, value, attn_mask=mask, average_attn_weights=averaged)
        return out.detach(), weights.detach()

    for out, weights in on_threads(main, 2):
        assert apart(out, expected[0]) < 1e-12
        assert apart(weights, expected[1]) < 1e-12


class Tied(nn.Module):
    """One table of words for going in and coming out, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.twice, self.out = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9, bias=False)
        self.again = self.twice
        self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.again(torch.tanh(self.twice(self.words(x)))))
        return y


def test_tied_weights_stay_tied() -> None:
    assert_alike(Tied().double(), torch.arange(8).view(2, 4), 3, "tensor=3")


def test_what_is_not_known_is_replicated() -> None:
    class Own(nn.Linear):
        pass

    frozen, hooked = nn.Linear(6, 6), nn.Linear(6, 6)
    frozen.weight.requires_grad_(False)
    hooked.register_forward_hook(lambda *_: None)
    model = nn.Sequential(Own(6, 6), frozen, hooked, nn.Linear(6, 6)).double()
    assert_alike(model, torch.randn(4, 6).double(), 2, "tensor=2")

    def main(rank: Rank) -> list[str]:
        return [name for name, m in split(copy.deepcopy(model), rank.comm).named_modules() if isinstance(m, Split)]

    assert on_threads(main, 2) == [["3"]] * 2


def test_pairs_are_made_where_they_pay() -> None:
    def kinds(model: nn.Module) -> list[str]:
        def main(rank: Rank) -> list[str]:
            return [type(m).__name__ for m in split(copy.deepcopy(model), rank.comm).modules() if isinstance(m, Split)]

        return list(on_threads(main, 2)[0])

    pair, apart_ = [ByOutputs.__name__, ByInputs.__name__], [ByOutputs.__name__] * 2
    assert kinds(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 23))) == pair
    assert kinds(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 24))) == apart_
    assert kinds(nn.Sequential(nn.Linear(4, 8), nn.Softmax(-1), nn.Linear(8, 8))) == apart_
    assert kinds(nn.MultiheadAttention(8, 2))[:1] == [ByHeads.__name__]


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
@pytest.mark.parametrize("widths", [(12, 24, 12, 12), (10, 7, 11, 6)])
def test_bytes_are_those_of_the_formula(ranks: int, widths: tuple[int, ...]) -> None:
    """Gholami 2018, model parallelism, all ranks together: sum B (P - 1) d_i to gather the outputs, and
    2 sum_{i >= 2} B (P - 1) d_{i - 1} to add up the gradients of the inputs, which the first layer does not need."""
    batch = 5
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))

    def main(rank: Rank, comm: Metered) -> None:
        loss_of(split(copy.deepcopy(model), comm, pairs=False)(torch.randn(batch, widths[0]))).backward()

    gathered, added_up = sum(widths[1:]), sum(widths[1:-1])
    assert sum(counted(main, ranks)) == 4 * batch * (ranks - 1) * (gathered + 2 * added_up)


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (nn.Sequential(nn.Linear(4, 2)), r"tensor=3: 0 \(Linear\) has 2 outputs to split; use tensor=2 or less"),
        (nn.Conv2d(4, 8, 1, groups=2), r"tensor=3: the model \(Conv2d\) has 2 groups to split"),
        (nn.MultiheadAttention(4, 2), r"tensor=3: the model \(MultiheadAttention\) has 2 heads to split"),
        (nn.MultiheadAttention(4, 1), r"tensor=3: the model \(MultiheadAttention\) has 1 head to split; use data=3"),
        (nn.Embedding(4, 2), r"tensor=3: the model \(Embedding\) has 2 features to split"),
    ],
)
def test_more_ranks_than_parts_are_refused(model: nn.Module, line: str) -> None:
    class Three:
        rank, size = 0, 3

    with pytest.raises(UserError, match=line):
        split(model, Three())  # type: ignore[arg-type]


def test_who_reads_the_weights_of_a_split_layer_is_told() -> None:
    class Three:
        rank, size = 0, 3

    own = split(nn.Sequential(nn.Linear(4, 4)), Three())  # type: ignore[arg-type]
    assert not hasattr(own[0], "weight")  # type: ignore[index]
    with pytest.raises(UserError, match="0 is split over ranks, but the model reads its weight itself"):
        own[0].weight  # type: ignore[index]  # noqa: B018


def test_who_reads_the_weights_is_told_before_anything_starts() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.layer.weight)

    with pytest.raises(UserError, match=r"^layer is split over ranks, but the model reads its weight itself"):
        check(Reads(), Layout.parse("tensor=2"), torch.zeros(4, 5))


def test_a_model_without_anything_to_split_is_refused() -> None:
    model = nn.Sequential(nn.LSTM(5, 3), nn.Tanh())
    with pytest.raises(UserError, match=r"tensor=2: nothing in the model can be split: it has LSTM, .* use data=2"):
        check(model, Layout.parse("tensor=2"), torch.zeros(4, 5))


def test_dropout_drops_the_same_everywhere() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)).double()
    outputs, gradient, *_ = split_gradient(model, torch.randn(5, 6).double(), 3, "tensor=3")
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    kept = (drop_alike(copy.deepcopy(model), 0)[1](torch.ones(1000, 10)) > 0).double().mean()  # type: ignore[index]
    assert 0.47 < kept < 0.53
    assert gradient.any()


def test_other_dropout_is_refused() -> None:
    with pytest.raises(UserError, match=r"0 \(Dropout2d\) draws other numbers on every rank of a split model"):
        check_dropout(nn.Sequential(nn.Dropout2d(0.5)))


class DropsItself(nn.Module):
    """As models with a forward of their own often do it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(F.dropout(self.first(x), 0.5, self.training))
        return y


def test_a_model_that_draws_itself_is_refused() -> None:
    """Its ranks would drop other things, and come apart without a word."""
    made = hocket.Task(model=DropsItself, data=(three_classes(),) * 2, batch=8, lr=0.05)
    with pytest.raises(UserError, match=r"the model draws random numbers itself \(bernoulli_\), .*; use nn.Dropout"):
        hocket.fit(made, layout="tensor=2", engine="threads", progress=False)


class Attends(nn.Module):
    """With dropout of both kinds, and layers that are asked what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(9, 12), nn.TransformerEncoderLayer(12, 3, 8, dropout=0.4)
        self.picture, self.out = nn.Conv2d(1, 4, 1, groups=1), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(self.words(x) * self.words.embedding_dim**0.5)
        hidden = self.picture(hidden[:, None]).sum(1) / (self.picture.out_channels * self.layer.self_attn.num_heads)
        y: Tensor = self.out(hidden).sum(1) / self.out.in_features
        return y


def test_attention_drops_in_its_own_heads_and_the_rest_alike() -> None:
    x = torch.arange(8).view(2, 4)
    outputs, *_ = split_gradient(Attends().double(), x, 2, "tensor=2")
    assert torch.equal(*outputs)
    check(Attends(), Layout.parse("tensor=2"), x)
    assert_alike(Attends().double().eval(), x, 2, "tensor=2")
