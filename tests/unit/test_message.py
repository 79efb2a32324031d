"""A message is a value of exactly known size."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hocket.core.comm import ring_bytes
from hocket.core.message import _DTYPES, Message

DTYPES = list(_DTYPES)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any bit pattern, also NaNs, in any layout: transposed tensors are not contiguous."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    g = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    if dtype == torch.bool:
        made = torch.rand(shape, generator=g) < 0.5
    else:
        count = torch.Size(shape).numel() * dtype.itemsize
        made = torch.randint(256, (count,), dtype=torch.uint8, generator=g).view(dtype).view(shape)
    return made.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else made


messages = st.builds(
    Message,
    kind=st.text(max_size=20),
    ints=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5).map(tuple),
    parts=st.lists(tensors(), max_size=4).map(tuple),
)


def bits(t: Tensor) -> list[int]:
    return t.contiguous().view(-1).view(torch.uint8).tolist() if t.numel() else []


def same(a: Message, b: Message) -> bool:
    def facts(m: Message) -> object:
        return m.kind, m.ints, [(t.dtype, t.shape, bits(t)) for t in m.tensors]

    return facts(a) == facts(b)


@settings(max_examples=300)
@given(message=messages)
def test_unpack_is_the_inverse_of_pack(message: Message) -> None:
    counted = message.copy().nbytes  # as a message that stays in its process is
    block = message.pack()
    assert len(block) == message.nbytes + 8 == counted + 8, "the meter's time comes behind, and is not counted"
    assert same(Message.unpack(block), message)


def test_the_time_of_posting_travels_with_a_message() -> None:
    message = Message("k", (1,), (torch.ones(3),))
    assert Message.unpack(message.pack()).posted_s == message.posted_s == math.inf
    sent = dataclasses.replace(message, posted_s=12.5)
    ways = Message.unpack(sent.pack()), sent.copy(), sent.to(torch.device("cpu"))
    assert [arrived.posted_s for arrived in ways] == [12.5] * 3
    assert same(sent, message) and message.posted_s == math.inf


def test_all_dtypes_have_a_round_trip() -> None:
    message = Message("all", (), tuple(torch.ones(3, dtype=d) for d in DTYPES))
    assert same(Message.unpack(message.pack()), message)


@given(numel=st.integers(0, 1000), ints=st.integers(0, 5))
def test_bytes_are_the_tensors_and_a_header_below_a_hundred(numel: int, ints: int) -> None:
    message = Message("gradient", (1,) * ints, (torch.zeros(numel),))
    assert 4 * numel < message.nbytes < 4 * numel + 100


def test_a_copy_is_independent_and_has_no_history() -> None:
    t = torch.zeros(3, requires_grad=True)
    message = Message("k", (1,), (t,))
    copy = message.copy()
    with torch.no_grad():
        t += 1
    assert copy.tensors[0].tolist() == [0, 0, 0] and not copy.tensors[0].requires_grad
    assert (copy.kind, copy.ints) == ("k", (1,))


def test_a_packed_message_is_a_copy() -> None:
    t = torch.zeros(3)
    block = Message("", (), (t,)).pack()
    t += 1
    assert Message.unpack(block).tensors[0].tolist() == [0, 0, 0]


@given(n=st.integers(0, 200), p=st.integers(1, 40), itemsize=st.sampled_from([2, 4, 8]))
def test_a_ring_sends_twice_all_but_one_share(n: int, p: int, itemsize: int) -> None:
    sent = [ring_bytes(n, itemsize, p, rank) for rank in range(p)]
    assert sum(sent) == 2 * (p - 1) * n * itemsize
    assert min(sent) >= 0
    assert max(sent) - min(sent) <= 2 * itemsize, "shared out evenly"


@pytest.mark.parametrize("p", [2, 3, 5])
def test_a_ring_counts_what_the_algorithm_sends(p: int) -> None:
    """Rank r sends the chunks r, r-1, ... in the first phase and r+1, r, ... in the second."""
    n = 7
    chunk = [len(c) for c in torch.arange(n).tensor_split(p)]
    for rank in range(p):
        first = sum(chunk[(rank - k) % p] for k in range(p - 1))
        second = sum(chunk[(rank + 1 - k) % p] for k in range(p - 1))
        assert ring_bytes(n, 4, p, rank) == 4 * (first + second)


def test_equal_messages_are_the_same_bytes() -> None:
    """Nothing of what was in memory before travels along, between the tensors either."""
    for _ in range(20):
        torch.full((200,), 7, dtype=torch.uint8)  # so that fresh memory is not zero
        one, two = (Message("k", (1,), (torch.ones(3), torch.ones(1, dtype=torch.int8))).pack() for _ in range(2))
        assert bytes(one) == bytes(two)


def test_what_a_message_says_of_itself_is_worked_out_once() -> None:
    message = Message("push", (1, 2), (torch.zeros(5),))
    assert message.header is message.header
