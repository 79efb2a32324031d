"""What a module must be like to become one flat vector."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hocket.core.errors import UserError


def check_module(model: nn.Module) -> None:
    """Refuse parameters without a shape or values, sparse ones, and ones that share memory.

    A parameter that is used in several places is one object and stays one. Different parameters that are views of
    the same memory would each get their own place in the flat vector: they would be tied no longer.
    """
    tensors = list(chain(model.named_parameters(), model.named_buffers()))
    for name, tensor in tensors:
        if is_lazy(tensor):
            raise UserError(
                f"{name} has no shape yet: it belongs to a lazy module; run a batch through the model first, "
                f"or build the layer with its input size"
            )
        if tensor.is_meta:
            raise UserError(f"{name} has no values: it is on the device meta; build the model on the cpu")
        if tensor.layout != torch.strided:
            raise UserError(f"{name} is sparse, which is not supported; make it dense with to_dense()")
        if tensor.requires_grad and _repeats(tensor):
            raise UserError(f"{name} is an expanded view, whose elements share memory; clone() it")
    _check_ties([(name, tensor) for name, tensor in tensors if tensor.numel()])


def _repeats(tensor: Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _check_ties(tensors: list[tuple[str, Tensor]]) -> None:
    """Refuse a trainable parameter that has memory in common with another tensor."""
    by_storage = defaultdict(list)
    for name, tensor in tensors:
        begin, end = _extent(tensor)
        by_storage[tensor.device, tensor.untyped_storage().data_ptr()].append((begin, end, name, tensor))
    for group in by_storage.values():
        group.sort(key=lambda entry: entry[:2])
        for i, (_, end, name, tensor) in enumerate(group):
            for begin, _, other_name, other in group[i + 1 :]:
                if begin >= end:
                    break  # the rest begins behind this one too
                if (tensor.requires_grad or other.requires_grad) and _overlap(tensor, other):
                    raise UserError(
                        f"{name} and {other_name} share memory but are two tensors, so training would part them; "
                        f"tie them by using one nn.Parameter in both places"
                    )


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage that it lies in: from, to."""
    reach = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    width, first = tensor.element_size(), int(tensor.storage_offset())
    return first * width, (first + reach + 1) * width


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two views of one storage have an element in common; views may also interleave."""
    if a.element_size() != b.element_size():
        return True
    taken = torch.zeros(a.untyped_storage().nbytes() // a.element_size(), dtype=torch.bool)
    taken.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
    return bool(taken.as_strided(b.shape, b.stride(), b.storage_offset()).any())
