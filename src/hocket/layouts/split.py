"""Layers of which each rank has a share, on replicated inputs: what they get and give is whole on every rank.

A dense layer follows the 1.5D scheme of Gholami et al. 2018 (Integrated Model, Batch and Domain Parallelism): the
outputs are gathered on the way there, the gradients of the inputs added up on the way back, where anybody needs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hocket.core.comm import Comm
from hocket.core.errors import UserError
from hocket.layouts.exchange import enter, leave, reduced, shares, span

_PLAIN = (int, float, str, tuple, type(None))


@dataclass(frozen=True)
class Cut:
    """Which elements of a whole tensor a rank has: these, along one dimension; all, where there is no index."""

    whole: str
    """The tensor's name in the layer that was split."""
    dim: int = 0
    index: Tensor | None = None

    def of(self, tensor: Tensor) -> Tensor:
        return tensor if self.index is None else tensor.index_select(self.dim, self.index.to(tensor.device))


class Missing(UserError, AttributeError):
    """Somebody reads what a layer that was split no longer has; `hasattr` says no."""


class Split(nn.Module):
    """A layer of which each rank has a share."""

    how: str
    """How it was split, in a few words."""

    def __init__(self, layer: nn.Module, comm: Comm, path: str) -> None:
        super().__init__()
        self.comm, self.path = comm, path
        self.cuts: dict[str, Cut] = {}
        self.told = {name: value for name, value in vars(layer).items() if isinstance(value, _PLAIN)}
        """Of the whole layer, such as `in_features`: a model may ask for it."""
        self.train(layer.training)

    def own(self, name: str, layer: nn.Module, cut: Cut) -> None:
        """Keep this rank's share of one of the layer's parameters."""
        whole: nn.Parameter | None = getattr(layer, cut.whole)
        if whole is None:
            self.register_parameter(name, None)
            return
        self.cuts[name] = cut
        self.register_parameter(name, nn.Parameter(cut.of(whole.detach()).clone()))

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias", "in_proj_weight", "in_proj_bias", "out_proj"):
            raise Missing(
                f"{self.path} is split over ranks, but the model reads its {name} itself; call the layer instead, "
                f"or derive a class from it: only PyTorch's own classes are split"
            )
        told = vars(self).get("told", {})
        return told[name] if name in told else super().__getattr__(name)

    def traffic(self, inputs: tuple[Tensor, ...], output: Tensor) -> int:
        """Elements that all ranks together send in one step, by the formulas."""
        raise NotImplementedError


class InOnePiece(Split):
    """The whole layer, for a first try without other ranks: nobody may ask more of it than of a share."""

    def __init__(self, layer: nn.Module, comm: Comm, path: str) -> None:
        super().__init__(layer, comm, path)
        if isinstance(layer, nn.MultiheadAttention):
            layer.dropout = 0.0  # in what each rank has for itself
        self.whole = [layer]
        """In a list, which PyTorch does not look into."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.whole[0](*args, **kwargs)


def _others_sum(comm: Comm, inputs: tuple[Tensor, ...]) -> int:
    """What it takes to add up the gradients of these inputs, each once: 2 (p - 1) n."""
    distinct = {id(x): x for x in inputs if x.requires_grad}
    return 2 * (comm.size - 1) * sum(x.numel() for x in distinct.values())


class ByOutputs(Split):
    """A dense layer by rows of its weights: each rank computes some of the outputs."""

    def __init__(self, layer: nn.Linear, comm: Comm, path: str, *, gathered: bool = True) -> None:
        super().__init__(layer, comm, path)
        self.sizes, self.gathered = shares(layer.out_features, comm.size), gathered
        rows = torch.arange(layer.out_features)[span(self.sizes, comm.rank)]
        self.own("own_weight", layer, Cut("weight", 0, rows))
        self.own("own_bias", layer, Cut("bias", 0, rows))
        self.how = "by outputs" if gathered else "by outputs, kept apart for the next layer"

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(enter(self.comm, x), self.own_weight, self.own_bias)
        return leave(self.comm, y, -1, self.sizes) if self.gathered else y

    def traffic(self, inputs: tuple[Tensor, ...], output: Tensor) -> int:
        gathered = (self.comm.size - 1) * output.numel() if self.gathered else 0
        return gathered + _others_sum(self.comm, inputs)


class ByInputs(Split):
    """A dense layer by columns, behind outputs that were kept apart, or heads: each rank has terms of every sum."""

    how = "by inputs"

    def __init__(self, layer: nn.Linear, comm: Comm, path: str, columns: Tensor | None = None) -> None:
        """`columns` are this rank's, unless they are shared out evenly."""
        super().__init__(layer, comm, path)
        if columns is None:
            columns = torch.arange(layer.in_features)[span(shares(layer.in_features, comm.size), comm.rank)]
        self.own("own_weight", layer, Cut("weight", 1, columns))
        self.own("whole_bias", layer, Cut("bias"))

    def forward(self, x: Tensor) -> Tensor:
        y = reduced(self.comm, F.linear(x, self.own_weight))
        return y if self.whole_bias is None else y + self.whole_bias

    def traffic(self, inputs: tuple[Tensor, ...], output: Tensor) -> int:
        return 2 * (self.comm.size - 1) * output.numel()


class ByChannels(Split):
    """A convolution by output channels; one of several groups by groups, of whose inputs a rank needs only its own."""

    def __init__(self, layer: nn.Conv2d, comm: Comm, path: str) -> None:
        super().__init__(layer, comm, path)
        groups = shares(layer.groups, comm.size) if layer.groups > 1 else [1] * comm.size
        outputs = layer.out_channels // layer.groups
        self.sizes = [g * outputs for g in groups] if layer.groups > 1 else shares(layer.out_channels, comm.size)
        self.own_groups, self.rows = groups[comm.rank], layer.in_channels // layer.groups
        self.first = sum(groups[: comm.rank]) * self.rows if layer.groups > 1 else 0
        channels = torch.arange(layer.out_channels)[span(self.sizes, comm.rank)]
        self.own("own_weight", layer, Cut("weight", 0, channels))
        self.own("own_bias", layer, Cut("bias", 0, channels))
        self.layer_padding, self.mode = layer._reversed_padding_repeated_twice, layer.padding_mode
        self.stride, self.padding, self.dilation = layer.stride, layer.padding, layer.dilation
        self.how = "by output channels" if layer.groups == 1 else "by groups"

    def forward(self, x: Tensor) -> Tensor:
        x = enter(self.comm, x).narrow(-3, self.first, self.own_groups * self.rows)
        padding = self.padding
        if self.mode != "zeros":
            x, padding = F.pad(x, self.layer_padding, mode=self.mode), (0, 0)
        y = F.conv2d(x, self.own_weight, self.own_bias, self.stride, padding, self.dilation, self.own_groups)
        return leave(self.comm, y, -3, self.sizes)

    def traffic(self, inputs: tuple[Tensor, ...], output: Tensor) -> int:
        return (self.comm.size - 1) * output.numel() + _others_sum(self.comm, inputs)


class ByFeatures(Split):
    """An embedding by its dimensions: each rank looks every word up, in some columns of the table."""

    how = "by features"

    def __init__(self, layer: nn.Embedding, comm: Comm, path: str) -> None:
        super().__init__(layer, comm, path)
        self.sizes = shares(layer.embedding_dim, comm.size)
        columns = torch.arange(layer.embedding_dim)[span(self.sizes, comm.rank)]
        self.own("own_weight", layer, Cut("weight", 1, columns))
        self.padding_idx, self.scaled = layer.padding_idx, layer.scale_grad_by_freq

    def forward(self, x: Tensor) -> Tensor:
        y = F.embedding(x, self.own_weight, self.padding_idx, scale_grad_by_freq=self.scaled)
        return leave(self.comm, y, -1, self.sizes)

    def traffic(self, inputs: tuple[Tensor, ...], output: Tensor) -> int:
        return (self.comm.size - 1) * output.numel()


class ByHeads(Split):
    """Attention by heads: a rank computes its heads, and its terms of the sum that the projection behind them is."""

    how = "by heads"
    batch_first = False
    """What PyTorch's encoder layer looks at before it takes a short cut to the weights, which are not all here."""

    def __init__(self, layer: nn.MultiheadAttention, comm: Comm, path: str) -> None:
        super().__init__(layer, comm, path)
        self.heads = shares(layer.num_heads, comm.size)
        self.drop = nn.Dropout(layer.dropout).train(layer.training)
        self.own_heads, self.head = self.heads[comm.rank], layer.head_dim
        self.batch_is_first, self.together = layer.batch_first, layer._qkv_same_embed_dim
        mine = span([h * self.head for h in self.heads], comm.rank)
        rows = torch.arange(layer.embed_dim)[mine]
        in_turn = torch.cat([rows + i * layer.embed_dim for i in range(3)])  # query, key, value, one below the other
        if self.together:
            self.own("own_in", layer, Cut("in_proj_weight", 0, in_turn))
        else:
            for letter in "qkv":
                self.own(f"own_{letter}", layer, Cut(f"{letter}_proj_weight", 0, rows))
        self.own("own_in_bias", layer, Cut("in_proj_bias", 0, in_turn))
        self.projection = ByInputs(layer.out_proj, comm, f"{path}.out_proj".lstrip("."), rows)

    def _inputs(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Queries, keys and values of this rank's heads: [batch, heads, length, dimensions of a head]."""
        entered: dict[int, Tensor] = {}
        for x in (query, key, value):
            if id(x) not in entered:  # one sum on the way back for what is used three times
                entered[id(x)] = enter(self.comm, x)
        weights = self.own_in.chunk(3) if self.together else (self.own_q, self.own_k, self.own_v)
        biases = (None,) * 3 if self.own_in_bias is None else self.own_in_bias.chunk(3)
        found = []
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True):
            projected = F.linear(entered[id(x)], weight, bias)
            if not self.batch_is_first:
                projected = projected.transpose(0, 1)
            batch, length, _ = projected.shape
            found.append(projected.view(batch, length, self.own_heads, self.head).transpose(1, 2))
        return found

    def _mask(self, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, causal: bool) -> Tensor | None:
        """One mask to be added to the scores; of masks that differ from head to head, this rank's heads'."""
        mask = None
        if attn_mask is not None:
            mask = _to_add(attn_mask, q)
            if mask.dim() == 3:
                every = mask.view(len(q), -1, *mask.shape[1:])
                mask = every[:, span(self.heads, self.comm.rank)]
        elif causal:
            raise UserError(f"{self.path}: is_causal needs an attn_mask, as in PyTorch")
        if padding is not None:
            more = _to_add(padding, q)[:, None, None, :]
            mask = more if mask is None else mask + more
        return mask

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        if single := query.dim() == 2:
            at = 0 if self.batch_is_first else 1
            wider = {id(x): x.unsqueeze(at) for x in (query, key, value)}
            query, key, value = (wider[id(x)] for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        q, k, v = self._inputs(query, key, value)
        scores = q @ k.transpose(-2, -1) * self.head**-0.5
        if (mask := self._mask(attn_mask, key_padding_mask, q, is_causal)) is not None:
            scores = scores + mask
        weights = self.drop(torch.softmax(scores, -1))
        y = (weights @ v).transpose(1, 2).flatten(2)
        out: Tensor = self.projection(y if self.batch_is_first else y.transpose(0, 1))
        shown = self._shown(weights, average_attn_weights) if need_weights else None
        if single:
            out, shown = out.squeeze(0 if self.batch_is_first else 1), None if shown is None else shown.squeeze(0)
        return out, shown

    def _shown(self, weights: Tensor, averaged: bool) -> Tensor:
        if averaged:
            return reduced(self.comm, weights.sum(1)) / sum(self.heads)
        return leave(self.comm, weights, 1, self.heads)

    def traffic(self, inputs: tuple[Tensor, ...], output: Tensor) -> int:
        return 2 * (self.comm.size - 1) * output.numel() + _others_sum(self.comm, inputs[:3])


def _to_add(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, float("-inf"))
    return mask.to(like.dtype)
