"""Laws of compressors by themselves: how much arrives, how large it is, what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hocket.compress import compressor, indices, make
from hocket.compress.memory import Memory
from hocket.compress.powersgd import orthogonal
from hocket.compress.sparsified import kept, largest
from hocket.core.errors import UserError
from hocket.core.state import Kept

BIASED = [
    "fp16", "bf16", "int8", "onebit", "sign", "topk:0.1", "topk:0.3+qsgd:bits=8", "topk:0.3+int8", "threshold:0.5",
    "randomk:0.2,feedback=on", "dgc:0.1", "powersgd:rank=1", "powersgd:rank=3",
]  # fmt: skip
UNBIASED = ["qsgd:bits=2", "qsgd:bits=4", "qsgd:bits=8", "terngrad:clip=0", "natural", "randomk:0.25"]
ALL = ["none", *BIASED, *UNBIASED, "terngrad"]
LENGTHS = [0, 1, 2, 3, 7, 8, 9, 127, 128, 129, 511, 513, 1025, 2049]

numbers = st.floats(-1000, 1000, width=32).map(lambda v: 0.0 if abs(v) < 1e-30 else v)
vectors = st.lists(numbers, min_size=0, max_size=700).map(lambda values: torch.tensor(values, dtype=torch.float32))


def normal(n: int, seed: int = 3) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def there_and_back(text: str, x: Tensor, seed: int = 1) -> Tensor:
    scheme = make(text)
    return scheme.decode(scheme.encode(x, seed), x.numel())


def test_the_laws_below_are_about_every_compressor() -> None:
    assert {text.partition(":")[0].partition("+")[0] for text in ALL} == set(compressor)


@pytest.mark.parametrize("text", ALL)
@pytest.mark.parametrize("n", LENGTHS)
def test_an_encoded_vector_is_as_long_as_it_says_and_comes_back_as_long_as_it_was(text: str, n: int) -> None:
    scheme, x = make(text), normal(n)
    block = scheme.encode(x, 1)
    assert block.dtype == torch.uint8 and block.dim() == 1
    if (size := scheme.size(n)) is not None:
        assert block.numel() == size
    padded = torch.cat([block, block.new_ones(5)])[: block.numel() + 5]
    assert torch.equal(scheme.decode(block, n), scheme.decode(padded, n))  # as in a gather of unequal ones
    assert scheme.decode(block, n).shape == (n,)
    assert torch.equal(scheme.encode(x, 1), block)
    total = torch.ones(n)
    scheme.add_to(total, block)
    torch.testing.assert_close(total, 1 + scheme.decode(block, n))


@pytest.mark.parametrize(
    ("text", "bits"),
    [("fp16", 16), ("int8", 8), ("qsgd:bits=2", 2), ("qsgd:bits=4", 4), ("natural", 9), ("onebit", 1), ("sign", 1)],
)
def test_a_value_takes_as_many_bits_as_promised(text: str, bits: int) -> None:
    n = 100_000
    size = make(text).size(n)
    assert size is not None and bits * n / 8 <= size <= bits * n / 8 * 1.15


@pytest.mark.parametrize("text", BIASED)
@settings(max_examples=40)
@given(x=vectors)
def test_a_biased_compressor_never_makes_it_worse(text: str, x: Tensor) -> None:
    """|C(x) - x|^2 <= (1 - delta) |x|^2, with some delta of 0 or more."""
    lost = (there_and_back(text, x) - x).double().norm() ** 2
    assert lost <= x.double().norm() ** 2 * (1 + 1e-5)


@settings(max_examples=60)
@given(x=vectors.filter(lambda x: x.numel() > 0), ratio=st.floats(0.01, 1))
def test_top_k_contracts_by_its_ratio(x: Tensor, ratio: float) -> None:
    k = kept(ratio, x.numel())
    lost = (there_and_back(f"topk:{ratio}", x) - x).double().norm() ** 2
    rounding = 1e-3  # of 16 bits
    assert lost <= (1 - k / x.numel() + rounding) * x.double().norm() ** 2


def test_random_k_contracts_by_its_ratio_on_average() -> None:
    x = normal(1000)
    lost = [(there_and_back("randomk:0.2,feedback=on", x, seed) - x).norm() ** 2 for seed in range(200)]
    assert float(torch.stack(lost).mean() / x.norm() ** 2) == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize("text", UNBIASED)
def test_an_unbiased_compressor_is_right_on_average_and_within_its_variance(text: str) -> None:
    x = normal(600) * torch.logspace(-2, 1, 600)
    draws = 4000
    found = torch.stack([there_and_back(text, x, seed * 7919) for seed in range(draws)]).double()
    spread = (found.std(0) / math.sqrt(draws)).clamp(min=float(x.abs().max()) / draws)  # the rarest draw a level
    bias = (found.mean(0) - x.double()).abs()
    assert bool((bias <= 5.5 * spread + 1e-3 * x.abs()).all())
    variance = float(((found - x.double()) ** 2).sum(1).mean() / x.double().norm() ** 2)
    assert variance <= make(text).variance * 1.02


@settings(max_examples=40)
@given(x=vectors, bits=st.sampled_from([2, 4, 8]), seed=st.integers(0, 2**62))
def test_qsgd_rounds_to_a_neighbouring_level(x: Tensor, bits: int, seed: int) -> None:
    found = there_and_back(f"qsgd:bits={bits}", x, seed)
    bucket, levels = (128 if bits == 2 else 512), 2 ** (bits - 1) - 1
    for begin in range(0, x.numel(), bucket):
        part, other = x[begin : begin + bucket], found[begin : begin + bucket]
        assert bool(((part - other).abs() <= part.abs().max() / levels * (1 + 1e-4)).all())


@settings(max_examples=100)
@given(x=st.lists(st.sampled_from([-2.0, -1.0, 0.0, 1.0, 2.0, 3.0]), min_size=1, max_size=300), data=st.data())
def test_top_k_has_k_places_whatever_ties_there_are(x: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(x)))
    values = np.array(x, np.float32)
    places = largest(values, k)
    assert places.tolist() == sorted(set(places.tolist())) and places.size == k
    left = np.delete(np.abs(values), places)
    assert not left.size or np.abs(values[places]).min() >= left.max()
    assert largest(values, k).tolist() == places.tolist()


@pytest.mark.parametrize("make_x", [lambda n: normal(n), lambda n: torch.ones(n), lambda n: normal(n) ** 9])
def test_a_sample_does_not_change_what_is_largest(make_x: object) -> None:
    x = make_x(200_000)  # type: ignore[operator]
    x[150_000:] = 0
    places = largest(x.numpy(), 2000)
    threshold = x.abs().topk(2000).values[-1]
    assert places.size == 2000 and bool((x.abs()[torch.from_numpy(places)] >= threshold).all())


@settings(max_examples=100)
@given(n=st.integers(1, 5000), data=st.data())
def test_places_come_back_in_the_bytes_that_were_promised(n: int, data: st.DataObject) -> None:
    places = np.array(sorted(data.draw(st.sets(st.integers(0, n - 1), max_size=200))), np.int64)
    block = indices.encode(places, n)
    assert block.size == indices.size(n, places.size)
    assert indices.decode(block, n, places.size).tolist() == places.tolist()


def test_a_place_takes_little_more_than_the_bits_that_it_must() -> None:
    assert indices.size(1_000_000, 10_000) * 8 / 10_000 < 8.7  # the entropy is 8.1


@pytest.mark.parametrize("text", ALL[1:])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused_and_leave_no_trace(text: str, bad: float) -> None:
    kept_state = Kept()
    memory = Memory(make(text), kept_state, 0, 0)
    x = normal(70)
    memory.encode("gradient", x)
    before = {name: v.clone() for name, v in memory.vectors.items()}
    x[13] = bad
    with pytest.raises(UserError, match="NaN or infinity"):
        memory.encode("gradient", x)
    assert before.keys() == memory.vectors.keys()
    assert all(torch.equal(v, memory.vectors[name]) for name, v in before.items())


@pytest.mark.parametrize("text", [t for t in BIASED if t != "dgc:0.1"])
@settings(max_examples=15)
@given(rates=st.lists(st.floats(0.01, 10), min_size=1, max_size=8))
def test_what_was_decoded_and_what_is_remembered_add_up(text: str, rates: list[float]) -> None:
    """Also while the rate changes, which the memory, in units of gradients, knows nothing of."""
    memory = Memory(make(text), Kept(), 0, 0)
    given_sum, sent_sum = torch.zeros(300, dtype=torch.float64), torch.zeros(300, dtype=torch.float64)
    for i, rate in enumerate(rates):
        gradient = normal(300, i).double() * rate
        _, sent = memory.encode("gradient", gradient)
        given_sum += gradient
        sent_sum += sent
    torch.testing.assert_close(sent_sum + memory.vectors["gradient"], given_sum, rtol=1e-9, atol=1e-9)


def test_feedback_can_be_left_out() -> None:
    memory = Memory(make("topk:0.1,feedback=off"), Kept(), 0, 0)
    memory.encode("gradient", normal(100))
    assert "gradient" not in memory.vectors


def test_the_memory_decays() -> None:
    memory, twin = (Memory(make(f"topk:0.1,decay={decay}"), Kept(), 0, 0) for decay in (0.5, 1))
    x = normal(100)
    memory.encode("x", x), twin.encode("x", x)
    _, sent = memory.encode("x", torch.zeros(100))
    torch.testing.assert_close(sent + memory.vectors["x"], 0.5 * twin.vectors["x"])


def test_dgc_without_a_ratio_to_speak_of_is_momentum() -> None:
    """All of v is sent at each step and u is masked: what is left is plain gradients; with none sent, momentum."""
    memory = Memory(make("dgc:ratio=0.01,ramp=0"), Kept(), 0, 0)
    g, u, v = normal(100), torch.zeros(100), torch.zeros(100)
    for _ in range(5):
        _, sent = memory.encode("gradient", g, momentum=0.9)
        u = 0.9 * u + g
        v = v + u
        at = v.abs().argmax()
        assert sent.nonzero().reshape(-1).tolist() == [int(at)]
        assert float(sent[at]) == pytest.approx(float(v[at]), rel=1e-3)
        v = v - sent
        u[at] = 0


def test_dgc_keeps_fewer_values_from_stage_to_stage() -> None:
    scheme = make("dgc:ratio=0.001,ramp=40")
    sizes = [len(scheme.at(step).encode(normal(10_000), 1)) for step in (0, 9, 10, 20, 30, 40, 1000)]
    assert sizes[0] == sizes[1] > sizes[2] > sizes[3] > sizes[4] > sizes[5] == sizes[6]


def test_dgc_keeps_the_largest_of_each_layer() -> None:
    scheme = make("dgc:ratio=0.1,ramp=0").layered([20, 5, 100])
    x = normal(125)
    x[:20] *= 100
    sent = scheme.decode(block := scheme.encode(x, 1), 125)
    layers = list(zip(x.split([20, 5, 100]), sent.split([20, 5, 100]), strict=True))
    assert [int((there != 0).sum()) for _, there in layers] == [2, 1, 10]
    assert all(there.abs().argmax() == here.abs().argmax() for here, there in layers)
    assert block.numel() == scheme.size(125)
    other = normal(40)
    assert torch.equal(scheme.encode(other, 1), make("dgc:ratio=0.1,ramp=0").encode(other, 1))


def test_dgc_clips_by_what_each_worker_may_contribute() -> None:
    memory = Memory(make("dgc:ratio=1,ramp=0,clip=2"), Kept(), 0, 0)
    _, sent = memory.encode("gradient", normal(100) * 50, ranks=4)
    assert float(sent.norm()) == pytest.approx(1.0, rel=1e-2)


@settings(max_examples=50)
@given(rows=st.integers(1, 12), columns=st.integers(1, 5), seed=st.integers(0, 1000), repeat=st.booleans())
def test_columns_become_orthogonal(rows: int, columns: int, seed: int, repeat: bool) -> None:
    matrix = normal(rows * columns, seed).view(rows, columns)
    if repeat:
        matrix[:, -1] = matrix[:, 0]
    found = orthogonal(matrix)
    product = found.T @ found
    assert bool(((product - torch.eye(columns)).abs().max(0).values < 1e-4).logical_or(found.norm(dim=0) == 0).all())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("topk:ratio=0", "greater than 0 and at most 1"),
        ("topk:1.5", "greater than 0 and at most 1"),
        ("randomk:-1", "greater than 0 and at most 1"),
        ("topk:many", "must be a number"),
        ("topk:0.1,decay=0", "decay must be greater than 0"),
        ("topk:0.1,feedback=off,decay=0.9", "no memory to fade; leave decay out"),
        ("randomk:0.1,decay=0.9", "no memory to fade; leave decay out"),
        ("randomk:0.1,feedback=on,decay=2", "decay must be greater than 0 and at most 1"),
        ("qsgd:bits=3", "bits must be 2, 4 or 8"),
        ("threshold:tau=0", "tau must be greater than 0"),
        ("powersgd:rank=0", "rank must be 1 or more"),
        ("terngrad:clip=-1", "clip must be 0 or more"),
        ("dgc:ramp=-1", "must be 0 or more"),
        ("topkk", "did you mean topk"),
        ("topk:ration=0.1", "did you mean ratio"),
        ("topk:0.1,feedback=maybe", "must be one of on, off"),
        ("qsgd:bits=4+topk:0.1", "a chain is"),
        ("topk:0.1+qsgd+int8", "a chain is"),
        ("topk:0.1+randomk:0.1", "cannot encode chosen values"),
        ("topk:0.1+powersgd", "cannot encode chosen values"),
        ("topk:0.1+none", "cannot encode chosen values"),
        ("topk:0.1+onebit:feedback=off", "give feedback and decay to that"),
        ("topk:0.1+int8:decay=0.5", "give feedback and decay to that"),
        ("onebit,feedback=off", "options follow a colon: onebit:feedback=off"),
        ("topk=0.01", "options follow a colon: topk:0.01"),
        ("", "no compressor is called"),
        ("topk+", "no compressor is called"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        make(text)
    assert "\n" not in str(error.value)


def test_integers_are_refused() -> None:
    with pytest.raises(UserError, match="vector of int64"):
        Memory(make("topk"), Kept(), 0, 0).encode("counts", torch.arange(5))


def test_powersgd_refuses_a_rank_that_no_matrix_has() -> None:
    shapes = [torch.Size([8, 5]), torch.Size([8])]
    make("powersgd:rank=5").check_model(shapes)
    with pytest.raises(UserError, match="use 5 or less"):
        make("powersgd:rank=6").check_model(shapes)
    with pytest.raises(UserError, match="no matrices"):
        make("powersgd:rank=1").check_model(shapes[1:])
