"""Half the bytes: each value in a shorter format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hocket.compress.scheme import Biased, as_bytes, compressor


@dataclass(frozen=True)
class Cast(Biased):
    """Rounds to the nearest value of a format of two bytes."""

    format: ClassVar[torch.dtype]

    def size(self, n: int) -> int:
        return 2 * n

    def encode(self, x: Tensor, seed: int) -> Tensor:
        largest = torch.finfo(self.format).max
        return as_bytes(x.clamp(-largest, largest).to(self.format))

    def decode(self, block: Tensor, n: int) -> Tensor:
        return block[: 2 * n].clone().view(self.format).to(torch.float32) if n else torch.empty(0)


@compressor("fp16")
@dataclass(frozen=True)
class Half(Cast):
    """16 bits a value, 10 of them precision; what is beyond 65504 is cut off."""

    format: ClassVar[torch.dtype] = torch.float16


@compressor("bf16")
@dataclass(frozen=True)
class Brain(Cast):
    """16 bits a value: the range of a float32, 7 bits of precision."""

    format: ClassVar[torch.dtype] = torch.bfloat16
