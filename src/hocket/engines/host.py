"""Tensors on their way through main memory, for what cannot carry them from where they are."""

from __future__ import annotations

import torch
from torch import Tensor


def on_host(x: Tensor) -> Tensor:
    """The tensor in contiguous main memory: itself where it can be, else a copy."""
    return x.detach() if x.device.type == "cpu" and x.is_contiguous() else x.detach().cpu().contiguous()


def give_back(x: Tensor, host: Tensor) -> None:
    """Put a result where it belongs, if it is not there already."""
    if x.data_ptr() != host.data_ptr():
        with torch.no_grad():
            x.copy_(host)
