"""Skip-gram with negative sampling as a PyTorch model: two vectors a word, scored by their products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from hocket.core.seeds import stream
from hocket.tasks.base import BringsKernel

if TYPE_CHECKING:
    from hocket.kernels.models.family import Kernel
    from hocket.kernels.models.windows import Text

AT_ONCE = 1024
"""Windows whose vectors are gathered at a time."""


@dataclass(frozen=True)
class Pairs:
    """Windows: each has one output that is right, then negatives, and the inputs around it where `weight` is not 0."""

    inputs: Tensor
    outputs: Tensor
    weight: Tensor
    """Of each pair of an input and an output."""

    def to(self, device: torch.device) -> Pairs:
        return Pairs(self.inputs.to(device), self.outputs.to(device), self.weight.to(device))


@dataclass(frozen=True)
class Scores:
    """What the model makes of `Pairs`."""

    scores: Tensor
    weight: Tensor


class Pieces(Dataset[tuple[Pairs, Tensor]]):
    """Pieces of a text; their windows are drawn anew whenever a piece is taken, unless they are `fixed`."""

    def __init__(self, text: Text, chosen: np.ndarray[Any, Any], seed: int, *, fixed: bool = False) -> None:
        self.text, self._chosen, self.seed, self._fixed = text, chosen, seed, fixed

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> tuple[Pairs, Tensor]:
        return self.take(torch.tensor([index]))

    def take(self, index: Tensor) -> tuple[Pairs, Tensor]:
        return self.drawn(index, stream(self.seed, "judged") if self._fixed else int(torch.randint(2**62, ())))

    def drawn(self, index: Tensor, seed: int) -> tuple[Pairs, Tensor]:
        """The windows of these pieces, and a target a piece, which says nothing."""
        from hocket.kernels.models.windows import Windows, draw  # Numba takes half a second to import

        windows, end = Windows.empty(len(index) * self.text.piece, self.text.negative), 0
        state = np.array([seed], np.uint64)
        for piece in self._chosen[index.numpy()]:
            end = draw(self.text, int(piece), state, windows, end)
        return _pairs(windows, end, self.text.window), torch.zeros(len(index))


def _pairs(windows: Any, end: int, window: int) -> Pairs:
    words, low, high, negatives = (torch.from_numpy(part[:end]).long() for part in windows)
    offsets = torch.cat([torch.arange(-window, 0), torch.arange(1, window + 1)])
    at = torch.arange(end)[:, None] + offsets
    inside = (at >= low[:, None]) & (at < high[:, None])
    inputs = words[at.clamp(0, max(end - 1, 0))]
    outputs = torch.cat([words[:, None], negatives], 1)
    right = torch.cat([torch.ones(end, 1, dtype=torch.bool), negatives != words[:, None]], 1)
    return Pairs(inputs, outputs, (inside[:, :, None] & right[:, None, :]).float())


def pair_loss(found: Scores, targets: Tensor) -> Tensor:
    """The mean loss of an input; its gradient is that of the pieces' sums, in the mean over the pieces.

    word2vec takes a step of the full rate for each pair, so the more pairs, the further it goes.
    """
    label = found.scores.new_full(found.scores.shape[2:], -1.0)  # perhaps of no window: all words were left out
    label[0] = 1.0
    total = (F.softplus(-label * found.scores) * found.weight).sum()
    stepped = total / len(targets)
    return stepped + (total / found.weight[:, :, 0].sum().clamp(min=1) - stepped).detach()


def auc(found: Scores, _: Tensor) -> Tensor:
    """How often a word that is there has a higher score than one that was drawn."""
    right, drawn, weight = found.scores[:, :, :1], found.scores[:, :, 1:], found.weight[:, :, 1:]
    above = (right > drawn).float() + 0.5 * (right == drawn).float()
    return (above * weight).sum() / weight.sum().clamp(min=1)


class SkipGram(BringsKernel):
    """score = product of a word's vector as input and another's as output (Mikolov et al. 2013)."""

    def __init__(self, words: int, dim: int) -> None:
        super().__init__()
        self.inputs = nn.Parameter(torch.rand(words, dim).sub_(0.5).div_(dim))
        self.outputs = nn.Parameter(torch.zeros(words, dim))

    def forward(self, pairs: Pairs) -> Scores:
        parts = zip(torch.split(pairs.inputs, AT_ONCE), torch.split(pairs.outputs, AT_ONCE), strict=True)
        scores = [self.inputs[inputs] @ self.outputs[outputs].mT for inputs, outputs in parts]
        return Scores(torch.cat(scores), pairs.weight)

    def kernel(self, loss: Callable[..., Tensor], samples: Any) -> Kernel | None:
        if loss is not pair_loss or not isinstance(samples, Pieces):
            return None
        from hocket.kernels.models.skipgram import SkipGramKernel  # Numba takes half a second to import

        return SkipGramKernel(samples.text, self.inputs.shape[1], samples.seed)
