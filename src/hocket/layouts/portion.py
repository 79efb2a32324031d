"""What a rank has of a model, and how it becomes the whole again: for checkpoints, for the model in the end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hocket.core.comm import Comm
from hocket.core.message import Message
from hocket.core.replica import Replica
from hocket.core.state import Tensors, decode, encode
from hocket.layouts.split import Cut, Split

_TAG = 7003  # apart from what a layout sends while it computes
_AS_LONG_AS_THE_MODEL = ("state.replica", "state.optimizer", "state.kept", "state.mail")
"""Where in a saved state vectors are that have one element for each parameter, or one for each buffer's too."""
_COUNTS = ("bytes_sent", "messages")
"""What is added up over the ranks of a model."""


class Portion(Protocol):
    """All ranks that have a part of one model call these together."""

    parameters: int
    """Of the whole model."""

    def whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state as a rank with the whole model would have it; known to the first of the ranks."""

    def own(self, state: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of such a state."""

    def state_dict(self) -> Tensors:
        """The whole model's; known to the first of the ranks."""

    def square(self, own: Tensor) -> Tensor:
        """The sum of squares of a vector of the whole model, of which this is what the rank has."""


class AllOfIt:
    """A rank that has the whole model."""

    def __init__(self, replica: Replica) -> None:
        self._model, self.parameters = replica.model, replica.x.numel()

    def whole(self, state: dict[str, Any]) -> dict[str, Any]:
        return state

    def own(self, state: dict[str, Any]) -> dict[str, Any]:
        return state

    def state_dict(self) -> Tensors:
        return dict(self._model.state_dict())

    def square(self, own: Tensor) -> Tensor:
        return own.double().square().sum().reshape(1).cpu()


class Outline:
    """Names, shapes and order of all that a whole model has: taken before it is split."""

    def __init__(self, model: nn.Module) -> None:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        dtype = next((p.dtype for p in trained.values()), torch.float32)
        buffers = dict(model.named_buffers())
        self.shapes = {name: tuple(p.shape) for name, p in trained.items()}
        self.parameters = sum(p.numel() for p in trained.values())
        self.shapes |= {name: tuple(b.shape) for name, b in buffers.items() if b.dtype == dtype}
        self.rest = [name for name, p in model.named_parameters() if not p.requires_grad]
        self.rest += [name for name, b in buffers.items() if b.dtype != dtype]
        self.name_of = {id(t): name for name, t in chain(model.named_parameters(), model.named_buffers())}
        """Of the tensors that the model had; those of layers that are not split stay the same objects."""
        self.keys = {key: self.name_of[id(t)] for key, t in model.state_dict(keep_vars=True).items()}
        self.offsets: dict[str, int] = {}
        at = 0
        for name, shape in self.shapes.items():
            self.offsets[name] = at
            at += torch.Size(shape).numel()
        self.numel = at

    def index(self, name: str) -> Tensor:
        """Where a tensor's elements are in the flat vector of the whole model."""
        shape = self.shapes[name]
        return torch.arange(self.offsets[name], self.offsets[name] + torch.Size(shape).numel()).view(shape)


class PartOfIt:
    """A rank that has a part. `comm` has all ranks with parts of this model; the first of them puts it together.

    `counts`: where several ranks have the same tensor, this is the one whose copy counts in a norm.
    """

    def __init__(
        self, outline: Outline, replica: Replica, origins: dict[str, tuple[str, Cut]], comm: Comm, counts: bool
    ) -> None:
        self._outline, self._replica, self._origins, self._comm = outline, replica, origins, comm
        self.parameters, self._counts = outline.parameters, counts
        self.optimized: list[str] = []
        """Where the optimizer has the parameters one by one, in the user's loop: their names in the whole model."""
        self._cut_of = dict(origins.values())
        frozen = [name for name, p in replica.model.named_parameters() if not p.requires_grad]
        dtype = replica.x.dtype
        self._buffers = [name for name, b in replica.model.named_buffers() if b.dtype == dtype]
        odd = [name for name, b in replica.model.named_buffers() if b.dtype != dtype]
        self._rest = [origins[name][0] for name in (*frozen, *odd)]

    def name_of(self, own: str) -> str:
        """What a parameter of this part is called in the whole model."""
        return self._origins[own][0]

    def _index(self) -> Tensor:
        """Where this rank's values are in those of the whole model. Not kept: it is longer than they are."""
        names = (self._origins[name] for name in (*self._replica.names, *self._buffers))
        return torch.cat([cut.of(self._outline.index(whole)).reshape(-1) for whole, cut in names])

    def whole(self, state: dict[str, Any]) -> dict[str, Any]:
        tensors: Tensors = {}
        text = encode(state, "state", tensors)
        indices = self._gathered(self._index())
        for name, tensor in tensors.items():
            if (parameter := self._parameter(name)) and tensor.dim():
                tensors[name] = self._assembled_alone(tensor, parameter)
            elif name.startswith(_AS_LONG_AS_THE_MODEL) and self._is_of_the_model(tensor):
                tensors[name] = self._assembled(tensor, indices)
        found: dict[str, Any] = decode(text, tensors)
        if "rest" in found:
            rest = self._gathered_rest(found["rest"])
            found["rest"] = [rest[name] for name in self._outline.rest if name in rest]
        if "totals" in found:
            counted = self._gathered(torch.tensor([found["totals"][name] for name in _COUNTS]))
            found["totals"] |= dict(
                zip(_COUNTS, torch.stack(counted).sum(0).tolist() if counted else (0, 0), strict=True)
            )
        return found

    def _parameter(self, name: str) -> str:
        """The parameter that a tensor of the optimizer's state belongs to, in the user's loop; empty elsewhere."""
        found = re.match(r"state\.optimizer\.state\.(\d+)\.", name)
        return self.optimized[int(found[1])] if found and self.optimized else ""

    def _assembled_alone(self, own: Tensor, parameter: str) -> Tensor:
        """A tensor of the shape of one parameter, put together."""
        shape = self._outline.shapes[parameter]
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        indices = self._gathered(self._cut_of[parameter].of(whole).reshape(-1))
        parts = self._gathered(own.reshape(-1))
        if not parts:
            return own
        found = own.new_zeros(whole.numel())
        for index, part in zip(indices, parts, strict=True):
            found[index] = part.to(own.device)
        return found.view(shape)

    def _is_of_the_model(self, tensor: Tensor) -> bool:
        return tensor.dim() == 1 and len(tensor) in (self._replica.x.numel(), self._replica.values.numel())

    def own(self, state: dict[str, Any]) -> dict[str, Any]:
        tensors: Tensors = {}
        text, index = encode(state, "state", tensors), self._index()
        lengths = {self._outline.parameters: self._replica.x.numel(), self._outline.numel: len(index)}
        for name, tensor in tensors.items():
            if (parameter := self._parameter(name)) and tensor.dim():
                tensors[name] = self._cut_of[parameter].of(tensor)
            elif name.startswith(_AS_LONG_AS_THE_MODEL) and tensor.dim() == 1 and len(tensor) in lengths:
                tensors[name] = tensor[index[: lengths[len(tensor)]]]
        found: dict[str, Any] = decode(text, tensors)
        by_name = dict(zip(self._outline.rest, found["rest"], strict=True))
        found["rest"] = [by_name[name] for name in self._rest]
        if self._comm.rank:  # the first one has the counts of all
            found["totals"] |= dict.fromkeys(_COUNTS, 0)
        return found

    def state_dict(self) -> Tensors:
        values = self._assembled(self._replica.values.detach().cpu(), self._gathered(self._index()))
        tensors = self._gathered_rest([t.cpu() for t in self._replica.rest()])
        if self._comm.rank:
            return {}
        tensors |= {name: values[self._outline.index(name)] for name in self._outline.shapes}
        return {key: tensors[name] for key, name in self._outline.keys.items()}

    def square(self, own: Tensor) -> Tensor:
        squares, total, at = own.double().square(), torch.zeros(1, dtype=torch.float64), 0
        sizes = [p.numel() for p in self._replica.parameters]
        sizes += [b.numel() for _, b in self._replica.model.named_buffers() if b.dtype == self._replica.x.dtype]
        for name, size in zip((*self._replica.names, *self._buffers), sizes, strict=True):
            if at < len(own) and (self._origins[name][1].index is not None or self._counts):
                total += squares[at : at + size].sum().cpu()
            at += size
        self._comm.all_reduce(total)
        return total

    # Between the ranks

    def _gathered(self, own: Tensor) -> list[Tensor]:
        """Every rank's, on the first one."""
        if self._comm.rank:
            self._comm.isend(0, Message("part", (), (own,)), _TAG).wait()
            return []
        return [own, *(self._comm.recv(r, _TAG)[1].tensors[0] for r in range(1, self._comm.size))]

    def _assembled(self, own: Tensor, indices: list[Tensor]) -> Tensor:
        """One vector of the whole model; where several ranks have the same element, the first one's counts."""
        parts = self._gathered(own)
        if not parts:
            return own
        pairs = list(zip(indices, parts, strict=True))
        without_buffers = any(len(part) < len(index) for index, part in pairs)
        whole = own.new_zeros(self._outline.parameters if without_buffers else self._outline.numel)
        for index, part in reversed(pairs):
            whole[index[: len(part)]] = part.to(own.device)
        return whole

    def _gathered_rest(self, own: list[Tensor]) -> dict[str, Tensor]:
        """What is not trained, by name, on the first rank."""
        comm = self._comm
        if comm.rank:
            comm.isend(0, Message("rest", (len(own),)), _TAG).wait()
            for name, tensor in zip(self._rest, own, strict=True):
                comm.isend(0, Message(name, (), (tensor,)), _TAG).wait()
            return dict(zip(self._rest, own, strict=True))
        found = dict(zip(self._rest, own, strict=True))
        for r in range(1, comm.size):
            for _ in range(comm.recv(r, _TAG)[1].ints[0]):
                msg = comm.recv(r, _TAG)[1]
                found.setdefault(msg.kind, msg.tensors[0].clone())
        return found


def origins(outline: Outline, part: nn.Module) -> dict[str, tuple[str, Cut]]:
    """Of each parameter and buffer of a model's part: its name in the whole model, and what was cut out of it."""
    found = {name: (outline.name_of.get(id(t), name), Cut("")) for name, t in _tensors(part)}
    for path, module in part.named_modules():
        if isinstance(module, Split):
            for name, cut in module.cuts.items():
                whole = f"{module.path}.{cut.whole}" if module.path else cut.whole
                found[f"{path}.{name}" if path else name] = whole, cut
    return found


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
