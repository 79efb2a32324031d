"""Dropout that drops the same on every rank: what all ranks compute alike must stay alike.

A layer that is split drops in what a rank alone has, each rank by numbers of its own.
"""

from __future__ import annotations

import zlib
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hocket.core.errors import UserError
from hocket.layouts.split import Split

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


def check_dropout(model: nn.Module) -> None:
    """Refuse layers that drop otherwise."""
    for path, module in model.named_modules():
        if isinstance(module, _OTHERS):
            kind = type(module).__name__
            raise UserError(f"{path} ({kind}) draws other numbers on every rank of a split model; use nn.Dropout there")


def drop_alike(model: nn.Module, replica: int) -> nn.Module:
    """Put it in the place of every nn.Dropout; replicas of the model draw numbers of their own."""
    for path, module in list(model.named_modules()):
        for name, child in module._modules.items():
            if type(child) is nn.Dropout and child.p > 0:
                own = module.comm.rank if isinstance(module, Split) else 0
                seed = zlib.crc32(f"{path}.{name}".encode()) + (replica << 32) + (own << 48)
                module._modules[name] = AlikeDropout(child.p, seed).train(child.training)
    return model


class NoDrawing(TorchDispatchMode):
    """Inside, nobody may draw from PyTorch's own generator, which has other numbers on every rank."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs or {}):
            raise UserError(
                f"the model draws random numbers itself ({func.overloadpacket.__name__}), others on every rank of a "
                f"split model; use nn.Dropout, or give it a torch.Generator that begins alike on all ranks"
            )
        return func(*args, **kwargs or {})


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    wanted = func._schema.arguments
    told = {each.name: each.default_value for each in wanted}
    told |= dict(zip((each.name for each in wanted), args, strict=False)) | kwargs
    return told.get("generator") is None and told.get("dropout_p", 1.0) > 0.0 and told.get("training", True)


def watch_for_drawing(model: nn.Module) -> None:
    """Refuse a model that draws, the first time that it is called to learn."""
    watching = ExitStack()

    def before(module: nn.Module, _: Any) -> None:
        if module.training:
            watching.enter_context(NoDrawing())

    def after(module: nn.Module, *_: Any) -> None:
        if module.training:
            watching.close()
            for handle in handles:
                handle.remove()

    handles = [model.register_forward_pre_hook(before), model.register_forward_hook(after, always_call=True)]
