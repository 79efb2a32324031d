"""What a compressor is: a vector of floats becomes fewer bytes, and comes back as nearly the same vector."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from hocket.core.errors import UserError
from hocket.core.registry import Registry, described

Vectors = dict[str, Tensor]
"""What a rank remembers from one vector to the next, by name: a compressor itself remembers nothing."""


class Compressor(ABC):
    """Makes a vector smaller for the wire. A frozen dataclass whose fields are its options.

    `encode` and `decode` take and give float32 on the CPU; the bytes of an encoded vector are all that is sent of it.
    """

    name: ClassVar[str]
    first: ClassVar[str] = ""
    """The option that may be given without its name, as in `topk:0.01`."""
    travels: ClassVar[Literal["gathered", "scattered", "factored"]] = "scattered"
    """How a mean is taken: everyone gets everyone's bytes; each rank sums one chunk, and sends it on encoded again; or
    as a sum of factors."""
    feedback: Literal["on", "off"] = "off"
    decay: float = 1.0
    takes_momentum: ClassVar[bool] = False
    """Whether its memory holds the optimizer's momentum, where gradients are averaged."""

    @property
    def variance(self) -> float:
        """Of an unbiased one: E |C(x) - x|^2 is at most so many times |x|^2."""
        return 0.0

    @property
    def arrives(self) -> float:
        """About what part of a vector arrives: a biased one's delta, where |C(x) - x|^2 <= (1 - delta) |x|^2."""
        return 1 / (1 + self.variance)

    @property
    def mixing(self) -> float:
        """How far workers may go towards models that they know only in part (Koloskova 2019 has a step to be tuned)."""
        return math.sqrt(self.arrives) * (1 + self.arrives) / 2

    def check(self) -> None:  # noqa: B027 - most take all that their types allow
        """Refuse options that cannot work, with one line that says what to do."""

    def check_model(self, shapes: Sequence[torch.Size]) -> None:  # noqa: B027 - most take any model
        """Refuse a model that it cannot do anything for."""

    def at(self, step: int) -> Compressor:
        """The compressor as it is at a step, counted from 0."""
        return self

    def layered(self, lengths: Sequence[int]) -> Compressor:
        """The compressor for vectors that are layers of these lengths, one after the other; others are as before."""
        return self

    @abstractmethod
    def size(self, n: int) -> int | None:
        """Bytes of an encoded vector of `n`; None where that depends on what is in it."""

    @abstractmethod
    def encode(self, x: Tensor, seed: int) -> Tensor:
        """The bytes of a vector of finite numbers. The same seed draws the same random numbers."""

    @abstractmethod
    def decode(self, block: Tensor, n: int) -> Tensor:
        """The vector of `n` that these bytes stand for."""

    def add_to(self, total: Tensor, block: Tensor) -> None:
        """Add the vector that these bytes stand for."""
        total += self.decode(block, total.numel())

    # Error feedback: what was lost is added to the next vector of that name (Seide 2014, Karimireddy 2019)

    def before(self, vectors: Vectors, name: str, x: Tensor, momentum: float, ranks: int) -> Tensor:
        """What is encoded in place of a change `x`."""
        if self.feedback == "off" or not name:
            return x
        if name not in vectors:
            return x.clone()
        return x + vectors[name] if self.decay == 1 else x + self.decay * vectors[name]

    def after(self, vectors: Vectors, name: str, wanted: Tensor, sent: Tensor) -> None:
        """Remember what was lost between what should have been sent and what was."""
        if self.feedback == "on" and name:
            vectors[name] = wanted - sent


@dataclass(frozen=True)
class Biased(Compressor):
    """One that is wrong on average, which error feedback makes good."""

    feedback: Literal["on", "off"] = "on"
    decay: float = 1.0
    """What is left of the error memory at each step; SparseLoCo has 0.95."""

    def check(self) -> None:
        check_memory(self)


def check_memory(scheme: Compressor) -> None:
    if not 0 < scheme.decay <= 1:
        raise UserError(f"compressor {scheme.name}: decay must be greater than 0 and at most 1, got {scheme.decay:g}")
    if scheme.decay < 1 and scheme.feedback == "off":
        raise UserError(f"compressor {scheme.name}: with feedback=off there is no memory to fade; leave decay out")


compressor: Registry[Compressor] = Registry("compressor", "compressors")


@compressor("none")
@dataclass(frozen=True)
class Identity(Compressor):
    """No compression: every value travels as it is."""

    def size(self, n: int) -> int:
        return 4 * n

    def encode(self, x: Tensor, seed: int) -> Tensor:
        return as_bytes(x)

    def decode(self, block: Tensor, n: int) -> Tensor:
        return floats(block, 0, n).clone()


def make(text: str) -> Compressor:
    """The compressor that `topk:ratio=0.01`, `topk:0.01` or a chain such as `topk:0.01+qsgd:bits=8` describes."""
    links = [_link(part.strip()) for part in text.split("+")]
    made = links[0]
    for link in links[1:]:
        if not hasattr(made, "values") or len(links) > 2:
            raise UserError(
                f"--compress {text}: a chain is one that chooses values and one that quantizes them, "
                "such as topk:0.01+qsgd:bits=8"
            )
        if link.travels != "scattered" or isinstance(link, Identity):
            raise UserError(f"--compress {text}: {link.name} cannot encode chosen values; use qsgd, int8, fp16 ...")
        if (link.feedback, link.decay) != (type(link).feedback, type(link).decay):
            raise UserError(
                f"--compress {text}: what {link.name} loses is in {made.name}'s memory; give feedback and decay to that"
            )
        made = dataclasses.replace(made, values=link)  # type: ignore[type-var]
    return made


def text_of(made: Compressor) -> str:
    """As `make` takes it."""
    chained = getattr(made, "values", made)
    is_chain = chained is not made and chained.name in compressor
    return f"{described(made)}+{described(chained)}" if is_chain else described(made)


def _link(text: str) -> Compressor:
    name, colon, rest = text.partition(":")
    first = compressor[name].first
    if colon and first and rest.strip() and "=" not in rest.partition(",")[0]:
        text = f"{name}:{first}={rest}"
    made = compressor.make(text)
    made.check()
    return made


# Bytes of tensors


def as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8) if x.numel() else torch.empty(0, dtype=torch.uint8)


def floats(block: Tensor, begin: int, count: int) -> Tensor:
    """So many float32 that begin at a byte, wherever that is."""
    return block[begin : begin + 4 * count].clone().view(torch.float32)  # a view would have to begin at a multiple of 4


def array(x: Tensor) -> np.ndarray[Any, Any]:
    return x.detach().contiguous().numpy()
