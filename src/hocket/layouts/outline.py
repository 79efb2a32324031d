"""What a whole model has, written down before it is split."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn

from hocket.core.replica import Shape, block_of, fingerprint_of, strides_of


class Outline:
    """Names, shapes and order of its parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        dtype, _ = block_of(list(trained.values()))
        buffers = dict(model.named_buffers())
        self.shapes: dict[str, Shape] = {name: (p.shape, strides_of(p)) for name, p in trained.items()}
        self.fingerprint = fingerprint_of(self.shapes.items())
        self.parameters = sum(p.numel() for p in trained.values())
        in_block = {name: b for name, b in buffers.items() if b.dtype == dtype}
        self.shapes |= {name: (b.shape, b.contiguous().stride()) for name, b in in_block.items()}
        self.rest = [name for name, p in model.named_parameters() if not p.requires_grad]
        self.rest += [name for name, b in buffers.items() if b.dtype != dtype]
        self.name_of = {id(t): name for name, t in chain(model.named_parameters(), model.named_buffers())}
        """Of the tensors that the model had; those of layers that are not split stay the same objects."""
        self.keys = {key: self.name_of[id(t)] for key, t in model.state_dict(keep_vars=True).items()}
        self.offsets: dict[str, int] = {}
        at = 0
        for name, (shape, _) in self.shapes.items():
            self.offsets[name] = at
            at += shape.numel()
        self.numel = at

    def index(self, name: str) -> Tensor:
        """Where a tensor's elements are in the flat vector of the whole model."""
        shape, strides = self.shapes[name]
        begin = self.offsets[name]
        return torch.arange(begin, begin + shape.numel()).as_strided(shape, strides)
