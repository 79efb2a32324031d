"""Dropout that drops the same on every rank: what all ranks compute alike must stay alike."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, nn

from hocket.core.errors import UserError

_OTHERS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU)


class AlikeDropout(nn.Module):
    """Draws from a generator of its own, which begins in the same state on all ranks of a model."""

    def __init__(self, p: float, seed: int) -> None:
        super().__init__()
        self.p = p
        self._generator = torch.Generator().manual_seed(seed)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = torch.rand(x.shape, generator=self._generator).to(x.device) >= self.p
        return x * kept / (1 - self.p) if self.p < 1 else x * 0


def drop_alike(model: nn.Module, replica: int) -> nn.Module:
    """Put it in the place of every nn.Dropout; replicas of the model draw numbers of their own."""
    for path, module in list(model.named_modules()):
        if isinstance(module, _OTHERS):
            kind = type(module).__name__
            raise UserError(f"{path} ({kind}) draws other numbers on every rank of a split model; use nn.Dropout there")
        for name, child in module._modules.items():
            if type(child) is nn.Dropout and child.p > 0:
                made = AlikeDropout(child.p, zlib.crc32(f"{path}.{name}".encode()) + (replica << 32))
                module._modules[name] = made.train(child.training)
    return model
