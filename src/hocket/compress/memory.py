"""What a rank's compressor remembers, under the names that a run's state has."""

from __future__ import annotations

import torch
from torch import Tensor

from hocket.compress.scheme import Compressor, Vectors
from hocket.core.errors import UserError
from hocket.core.seeds import stream
from hocket.core.spans import Spans, unseen
from hocket.core.state import Kept, State


class Memory:
    """Encodes vectors, with what was lost of those before them: residuals, momentum, factors, and what others know."""

    def __init__(self, scheme: Compressor, kept: Kept, seed: int, rank: int, spans: Spans = unseen) -> None:
        self.scheme, self.spans = scheme, spans
        self.exactly = False
        """From now on nothing is encoded: what is lost last could not be made good."""
        self.vectors: Vectors = kept.keep("compressor", {})
        self.steps: dict[str, int] = kept.keep("compressor/steps", {})
        """Vectors encoded so far, by name."""
        self.counts = kept.keep("compressor/counts", State(draws=0, momentum=0.0))
        self._seed, self._rank = seed, rank

    def warm_up(self) -> None:
        """Let all that is compiled be compiled before the clock runs."""
        x = torch.ones(9)
        check_finite(x, self.scheme, "")
        self.scheme.decode(self.scheme.encode(x, 0), 9)

    def draw(self) -> int:
        """A seed that no other vector of any rank has."""
        self.counts.draws += 1
        return stream(self._seed, "compress", self._rank, self.counts.draws)

    def encode(self, name: str, x: Tensor, momentum: float = 0.0, ranks: int = 1) -> tuple[Tensor, Tensor]:
        """A change as bytes, and as the change that they stand for; what lies between is kept under the name."""
        with self.spans("encode"):
            check_finite(x, self.scheme, name)
            scheme = self.scheme.at(self.step(name))
            wanted = scheme.before(self.vectors, name, x, momentum, ranks)
            block = scheme.encode(plain(wanted), self.draw())
            sent = self.decode(block, x)
            scheme.after(self.vectors, name, wanted, sent)
        return block, sent

    def step(self, name: str) -> int:
        """How many vectors of that name there were before this one."""
        step = self.steps.get(name, 0)
        self.steps[name] = step + 1
        return step

    def decode(self, block: Tensor, like: Tensor) -> Tensor:
        """The vector that these bytes stand for, as long and of the kind as another."""
        with self.spans("decode"):
            return self.scheme.decode(block.cpu(), like.numel()).to(like.device, like.dtype)


def plain(x: Tensor) -> Tensor:
    """As compressors take it."""
    return x.detach().to("cpu", torch.float32).contiguous()


def check_finite(x: Tensor, scheme: Compressor, name: str) -> None:
    """Refuse what no bytes stand for, before anything of it is remembered or sent."""
    from hocket.kernels import codecs  # Numba takes half a second to import

    if not x.is_floating_point():
        kind = str(x.dtype).removeprefix("torch.")
        raise UserError(f"compressor {scheme.name}: '{name}' is a vector of {kind}; only floats can be compressed")
    if x.numel() and not codecs.all_finite(plain(x).numpy().view("int32")):
        raise UserError(
            f"compressor {scheme.name}: '{name or 'a vector'}' has NaN or infinity in it, and was not sent; "
            "training has diverged: use a lower --lr"
        )
