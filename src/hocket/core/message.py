"""What ranks send each other: a kind, a few integers and tensors. A value, never pickled, of exactly known size."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
_CODE = {dtype: code for code, dtype in enumerate(_DTYPES)}
_TIME = struct.Struct("<d")
_ALIGN = 16  # tensors start at multiples of this, so that they can be read in place
_LONG = 4096  # bytes of a tensor that are not worth copying to have fewer pieces
_OF_NUMPY = frozenset(_DTYPES) - {torch.bfloat16}
_NOTHING = np.empty(0, np.uint8)


@dataclass  # made at every message, as that is: a frozen one takes four times as long
class Lossy:
    """A vector that may lose precision on the way. `residual` names the place where the sender keeps what was lost.

    Without a name nothing is kept. Everything else in a message is exact: weights, counters, statistics.
    """

    values: Tensor
    """What the receiver will find: where somebody has encoded them, as they are after that."""
    residual: str
    is_model: bool = False
    """It is a state, much as it was in the last message to the same rank, and not a change that is to be added."""
    packed: tuple[int, Tensor] | None = None
    """How the vector is encoded, and as which bytes; None where nobody has done that."""


Seal = Callable[[int, Lossy], Lossy]
"""Encodes a vector for the rank that it is sent to."""


def as_it_is(to: int, part: Lossy) -> Lossy:
    return part


@dataclass
class Message:
    """One message. `kind` says what it means to the receiver, who matches on it and finds plain tensors."""

    kind: str = ""
    ints: tuple[int, ...] = ()
    parts: tuple[Tensor | Lossy, ...] = ()
    posted_s: float = math.inf
    """When its sender began to send it, on the clock that all ranks share; inf where nobody took the time."""

    def __post_init__(self) -> None:
        self.tensors = tuple([part.values if isinstance(part, Lossy) else part for part in self.parts])
        """The values of all parts."""

    @cached_property
    def header(self) -> bytes:
        """Everything but the tensors' contents: lengths, kind, integers, dtypes and shapes."""
        kind, ints, tensors = self.kind.encode(), self.ints, self.tensors
        first = struct.pack(f"<BBB{len(kind)}s{len(ints)}q", len(kind), len(ints), len(tensors), kind, *ints)
        return first + b"".join([_kind_of_tensor(t.dtype, t.shape) for t in tensors])

    @cached_property
    def nbytes(self) -> int:
        """Bytes on the wire: header, padding and tensors. The time behind them is the meter's, and is not counted."""
        # As long as the header, which a message that stays in this process does not need
        size = 3 + len(self.kind.encode()) + 8 * len(self.ints) + sum([2 + 8 * t.dim() for t in self.tensors])
        for t in self.tensors:
            size += -size % _ALIGN + t.nbytes
        return size

    def to(self, device: torch.device) -> Message:
        """The message with its tensors on a device."""
        return Message(self.kind, self.ints, tuple(t.to(device) for t in self.tensors), self.posted_s)

    def copy(self) -> Message:
        """A message that later changes to the sender's tensors cannot reach."""
        return Message(self.kind, self.ints, tuple([t.detach().clone() for t in self.tensors]), self.posted_s)

    def pieces(self) -> list[np.ndarray]:
        """The message as blocks of bytes, ready for the wire: long tensors as they lie in memory, where they may."""
        found: list[np.ndarray] = []
        short, at = bytearray(self.header), len(self.header)
        for t in self.tensors:
            raw = _bytes(t)
            short += bytes(-at % _ALIGN)
            at += -at % _ALIGN + len(raw)
            if len(raw) < _LONG:
                short += raw.data
            else:
                found += np.frombuffer(short, np.uint8), raw
                short = bytearray()
        self.nbytes = at
        short += _TIME.pack(self.posted_s)
        return [*found, np.frombuffer(short, np.uint8)]

    def pack(self) -> np.ndarray:
        """The message as one block of bytes."""
        return np.concatenate(self.pieces())

    @classmethod
    def unpack(cls, block: np.ndarray) -> Message:
        """The message in a block made by `pack`. Its tensors share the block's memory."""
        raw = block.data
        kind_len, n_ints, n_tensors = raw[:3]
        kind, *ints = struct.unpack_from(f"<{kind_len}s{n_ints}q", raw, 3)
        at = 3 + kind_len + 8 * n_ints
        shapes = []
        for _ in range(n_tensors):
            dim = raw[at + 1]
            shapes.append((_DTYPES[raw[at]], struct.unpack_from(f"<{dim}q", raw, at + 2)))
            at += 2 + 8 * dim
        tensors = []
        for dtype, shape in shapes:
            at += -at % _ALIGN
            count = math.prod(shape)
            if count:
                flat = torch.frombuffer(block, dtype=dtype, count=count, offset=at)
                tensors.append(flat if len(shape) == 1 else flat.view(shape))
            else:
                tensors.append(torch.empty(shape, dtype=dtype))
            at += count * dtype.itemsize
        return cls(kind.decode(), tuple(ints), tuple(tensors), *_TIME.unpack_from(raw, at))


@lru_cache(maxsize=64)  # most messages are like others
def _kind_of_tensor(dtype: torch.dtype, shape: torch.Size) -> bytes:
    return struct.pack(f"<BB{len(shape)}q", _CODE[dtype], len(shape), *shape)


def _bytes(t: Tensor) -> np.ndarray:
    """A tensor's bytes as they lie in memory, where they lie there in one piece."""
    if not t.numel():
        return _NOTHING
    if t.requires_grad or not t.is_cpu or not t.is_contiguous():
        t = t.detach().cpu().contiguous()
    if t.dim() == 1 and t.dtype in _OF_NUMPY:  # as almost all are: in two calls
        return t.numpy().view(np.uint8)
    return t.view(-1).view(torch.uint8).numpy()
