"""Tensor parallelism: walks a user's module and gives each rank its share of every layer that can be split.

What a layer gets and gives is whole on every rank, so all that is not split, known or unknown, is computed by all
ranks alike. Only between the two layers of a pair is an activation shared out (Shoeybi et al. 2019, Megatron-LM).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn

from hocket.core.comm import Comm
from hocket.core.errors import UserError
from hocket.core.units import counted
from hocket.layouts.split import ByChannels, ByFeatures, ByHeads, ByInputs, ByOutputs, Split

ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh,
    nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid, nn.Identity,
)  # fmt: skip
"""What may stand between the two layers of a pair: each output follows from one input."""

Make = Callable[[Any, Comm, str], Split]


def split(model: nn.Module, comm: Comm, *, pairs: bool = True) -> nn.Module:
    """This rank's share of a model. The model is taken apart; what is not split stays the same object."""
    made = _Walk(model, comm, pairs).replaced(model, "")
    if not any(isinstance(module, Split) for module in made.modules()):
        kinds = ", ".join(sorted({type(m).__name__ for m in made.modules() if m._parameters}) or ["no parameters"])
        raise UserError(
            f"tensor={comm.size}: nothing in the model can be split: it has {kinds}, and only PyTorch's own "
            f"{', '.join(kind.__name__ for kind in _LAYERS)} are split, where they are trained and not tied; use "
            f"data={comm.size}"
        )
    return made


class _Walk:
    def __init__(self, model: nn.Module, comm: Comm, pairs: bool) -> None:
        self._comm, self._pairs = comm, pairs
        self._done: dict[nn.Module, nn.Module] = {}
        places = (p for m in model.modules() for p in m._parameters.values() if p is not None)
        self._tied = {p for p, count in Counter(places).items() if count > 1}
        self._uses = Counter(child for m in model.modules() for child in m._modules.values())

    def replaced(self, module: nn.Module, path: str) -> nn.Module:
        if module not in self._done:
            self._done[module] = self._made(module, path)
        return self._done[module]

    def _made(self, module: nn.Module, path: str) -> nn.Module:
        if self.can_be_split(module):
            make, parts = _LAYERS[type(module)]
            found, noun = parts(module)
            if found < self._comm.size:
                raise UserError(
                    f"tensor={self._comm.size}: {_named(module, path)} has {counted(found, noun)} to split; "
                    f"use {f'tensor={found} or less' if found > 1 else f'data={self._comm.size}'}"
                )
            return make(module, self._comm, path)
        if type(module) is nn.Sequential and self._pairs:
            self._split_pairs(module, path)
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # it reads the weights of its layers
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = self.replaced(child, f"{path}.{name}" if path else name)
        return module

    def can_be_split(self, module: nn.Module) -> bool:
        """Whether it is one of PyTorch's own layers, as PyTorch made it: alone with its parameters, which are trained,
        and without hooks, which may do anything."""
        if type(module) not in _LAYERS:
            return False
        hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
        parameters = list(module.parameters())
        plain = not any(hooks) and all(p.requires_grad and p not in self._tied for p in parameters)
        match module:
            case nn.Embedding():
                return plain and module.max_norm is None and not module.sparse
            case nn.MultiheadAttention():
                return plain and module.bias_k is None and not module.add_zero_attn
        return plain

    def _split_pairs(self, sequence: nn.Sequential, path: str) -> None:
        """Two dense layers with nothing but elementwise functions between them need one sum in place of two gathers
        and a sum: 2 d_2 in place of 3 d_1 + d_2, where the first has d_1 outputs and the second d_2."""
        before: tuple[str, nn.Linear] | None = None
        for name, layer in list(sequence._modules.items()):
            here = f"{path}.{name}" if path else name
            if type(layer) is nn.Linear and self.can_be_split(layer) and self._uses[layer] == 1:
                if before and 3 * before[1].out_features > layer.out_features:
                    first, width = before[1], before[1].out_features
                    if width < self._comm.size:
                        return  # refused when it is its turn
                    at = here.removesuffix(name) + before[0]
                    self._done[first] = ByOutputs(first, self._comm, at, gathered=False)
                    self._done[layer] = ByInputs(layer, self._comm, here)
                    before = None
                else:
                    before = name, layer
            elif type(layer) not in ELEMENTWISE:
                before = None


_LAYERS: dict[type[nn.Module], tuple[Make, Callable[..., tuple[int, str]]]] = {
    nn.Linear: (ByOutputs, lambda m: (m.out_features, "output")),
    nn.Conv2d: (ByChannels, lambda m: (m.out_channels, "channel") if m.groups == 1 else (m.groups, "group")),
    nn.Embedding: (ByFeatures, lambda m: (m.embedding_dim, "feature")),
    nn.MultiheadAttention: (ByHeads, lambda m: (m.num_heads, "head")),
}
"""Of each kind: who makes a share of it, and how many parts of which name there are to share out."""


def _named(module: nn.Module, path: str) -> str:
    return f"{path or 'the model'} ({type(module).__name__})"
