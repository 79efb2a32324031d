"""What a rank has of a model, and how it becomes the whole again: for checkpoints, for the model in the end."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from hocket.core.comm import Comm
from hocket.core.errors import UserError
from hocket.core.message import Message
from hocket.core.replica import Replica
from hocket.core.state import Tensors, decode, encode
from hocket.layouts.outline import Outline
from hocket.layouts.split import Cut, Split

_TAG = 7003  # apart from what a layout sends while it computes
_AS_LONG_AS_THE_MODEL = ("state.replica", "state.optimizer", "state.kept", "state.mail")
"""Where in a saved state vectors are that have one element for each parameter, or one for each buffer's too."""
_COUNTS = ("bytes_sent", "messages")
"""What is added up over the ranks of a model."""
_PIECE = 1 << 20
_COMPRESSOR = "compressor"
"""Where in what is kept a compressor has its vectors."""
_OTHER_LAYOUT = (
    "the checkpoint has what a compressor remembers of other parts of the model; go on with the layout that was saved, "
    "or begin anew"
)


class Portion(Protocol):
    """All ranks that have a part of one model call these together."""

    parameters: int
    """Of the whole model."""
    stages: str
    """How many layers each stage of a pipeline has, as `stages=` says it; empty where there is none."""

    def whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state as a rank with the whole model would have it; known to the first of the ranks."""

    def own(self, state: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of such a state."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The whole model's, one after the other, by their names in its state dict; known to the first of the ranks."""

    def fingerprint(self) -> str:
        """The same for whole models whose vectors mean the same, see `Replica.fingerprint`."""

    def square(self, own: Tensor) -> Tensor:
        """The sum of squares of a vector of the whole model, of which this is what the rank has."""

    def length(self, own: Tensor) -> Tensor:
        """The length of such a vector."""

    def norm(self, own: Mapping[str, Tensor], kind: float) -> Tensor:
        """A norm of some tensors, of each of which this is what the rank has, by the names of its own parameters."""

    def gathered(self, own: Tensor) -> list[Tensor]:
        """Every rank's tensor, on the first one."""

    def make_alike(self, values: Tensor, *, counted: bool = True) -> None:
        """What several ranks have whole becomes that of the first one, where each may have come to something else.
        These are values of parameters, or of parameters and buffers; not `counted` is for a look at them."""


class AllOfIt:
    """A rank that has the whole model."""

    def __init__(self, replica: Replica) -> None:
        self._replica, self.parameters, self.stages = replica, replica.x.numel(), ""

    def whole(self, state: dict[str, Any]) -> dict[str, Any]:
        return state

    def own(self, state: dict[str, Any]) -> dict[str, Any]:
        _check_whole(state)
        return state

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._replica.model.state_dict().items()

    def fingerprint(self) -> str:
        return self._replica.fingerprint()

    def square(self, own: Tensor) -> Tensor:
        return _sum_of_squares(own)

    def length(self, own: Tensor) -> Tensor:
        length: Tensor = torch.linalg.vector_norm(own)
        return length

    def norm(self, own: Mapping[str, Tensor], kind: float) -> Tensor:
        return get_total_norm(own.values(), kind)

    def gathered(self, own: Tensor) -> list[Tensor]:
        return [own]

    def make_alike(self, values: Tensor, *, counted: bool = True) -> None:
        pass


class PartOfIt:
    """A rank that has a part. `comm` has all ranks with parts of this model; the first of them puts it together.
    `within` has those with parts of the same layers, who may have some tensors alike: the first one's copy counts.
    `bare` is the same where nothing is counted.
    """

    def __init__(
        self,
        outline: Outline,
        replica: Replica,
        origins: dict[str, tuple[str, Cut]],
        comm: Comm,
        within: Comm,
        bare: Comm,
        stages: str,
    ) -> None:
        self._outline, self._replica, self._origins, self._comm = outline, replica, origins, comm
        self.parameters, self._within, self._bare, self._counts = outline.parameters, within, bare, within.rank == 0
        self.stages = stages
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
        index = torch.empty(self._replica.x.numel(), dtype=torch.int64)
        for name, place in self._replica.layout(index).items():
            place.copy_(self._index_of(name))
        return torch.cat([index, *(self._index_of(name).reshape(-1) for name in self._buffers)])

    def _index_of(self, own: str) -> Tensor:
        whole, cut = self._origins[own]
        return cut.of(self._outline.index(whole))

    def whole(self, state: dict[str, Any]) -> dict[str, Any]:
        tensors: Tensors = {}
        state, alone = self._taken_out(state)
        text = encode(state, "state", tensors)
        indices = self.gathered(self._index())
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
            counted = self.gathered(torch.tensor([found["totals"][name] for name in _COUNTS]))
            found["totals"] |= dict(
                zip(_COUNTS, torch.stack(counted).sum(0).tolist() if counted else (0, 0), strict=True)
            )
        return found | alone

    def _taken_out(self, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a compressor remembers is kept rank by rank too. Of tensors that several ranks have alike each has lost
        something else; and some vectors, such as factors of layers, are not of the model's elements: those are taken
        out of what is put together, and are of use to the same parts alone."""
        kept = state.get("kept", {})
        if _COMPRESSOR not in kept:
            return state, {}
        memory: Tensors = kept[_COMPRESSOR]
        everyone = self._gathered_by_name(self._replica.fingerprint(), memory)
        of_the_model = {name: tensor for name, tensor in memory.items() if self._is_of_the_model(tensor)}
        return state | {"kept": kept | {_COMPRESSOR: of_the_model}}, {"alone": everyone}

    def _of_this_rank_alone(self, state: dict[str, Any]) -> Tensors:
        """What was kept of this very part; nothing where another layout can do without, else that is refused."""
        everyone: list[tuple[str, Tensors]] = state.get("alone", [])
        if len(everyone) == self._comm.size:
            mark, own = everyone[self._comm.rank]
            if mark == self._replica.fingerprint():
                return own
        memory: Tensors = state["kept"].get(_COMPRESSOR, {})
        if any(len(tensor) not in (self._outline.parameters, self._outline.numel) for tensor in memory.values()):
            raise UserError(_OTHER_LAYOUT)
        _check_whole(state)
        return {}

    def _parameter(self, name: str) -> str:
        """The parameter that a tensor of the optimizer's state belongs to, in the user's loop; empty elsewhere."""
        found = re.match(r"state\.optimizer\.state\.(\d+)\.", name)
        return self.optimized[int(found[1])] if found and self.optimized else ""

    def _assembled_alone(self, own: Tensor, parameter: str) -> Tensor:
        """A tensor of the shape of one parameter, put together."""
        shape, _ = self._outline.shapes[parameter]
        whole = torch.arange(shape.numel()).view(shape)
        indices = self.gathered(self._cut_of[parameter].of(whole).reshape(-1))
        parts = self.gathered(own.reshape(-1))
        if not parts:
            return own
        found = own.new_zeros(whole.numel())
        for index, part in reversed([*zip(indices, parts, strict=True)]):
            found[index] = part.to(own.device)
        return found.view(shape)

    def _is_of_the_model(self, tensor: Tensor) -> bool:
        return tensor.dim() == 1 and len(tensor) in (self._replica.x.numel(), self._replica.values.numel())

    def own(self, state: dict[str, Any]) -> dict[str, Any]:
        alone = self._of_this_rank_alone(state)
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
        if alone:
            found["kept"][_COMPRESSOR] |= alone
        return found

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        own = {
            self._origins[name][0]: (t.detach(), self._origins[name][1]) for name, t in _tensors(self._replica.model)
        }
        for key, name in self._outline.keys.items():
            whole = self._put_together(name, own.get(name))
            if self._comm.rank == 0:
                yield key, whole

    def _put_together(self, name: str, own: tuple[Tensor, Cut] | None) -> Tensor:
        """One tensor of the whole model, on the first rank, from those who have something of it."""
        nothing = torch.empty(0, dtype=torch.int64)
        told = Message("none")
        if own is not None:
            tensor, cut = own
            told = Message(
                "part", (cut.dim, int(cut.index is None)), (tensor.cpu(), nothing if cut.index is None else cut.index)
            )
        if self._comm.rank:
            self._comm.isend(0, told, _TAG).wait()
            return nothing
        everyone = [told, *(self._comm.recv(r, _TAG)[1] for r in range(1, self._comm.size))]
        parts = [msg for msg in everyone if msg.kind == "part"]
        if parts[0].ints[1]:
            return parts[0].tensors[0].clone()
        whole = parts[0].tensors[0].new_empty(self._outline.shapes[name][0])
        for msg in parts:
            whole.index_copy_(msg.ints[0], msg.tensors[1], msg.tensors[0])
        return whole

    def square(self, own: Tensor) -> Tensor:
        total = torch.zeros(1, dtype=torch.float64)
        for name, piece in self._pieces(own):
            if self._counts or not self._is_whole(name):
                total += _sum_of_squares(piece)
        self._comm.all_reduce(total)
        return total

    def _pieces(self, vector: Tensor) -> Iterator[tuple[str, Tensor]]:
        """What a vector of parameters, or of these and the buffers, has of each."""
        sizes = [p.numel() for p in self._replica.parameters]
        sizes += [b.numel() for _, b in self._replica.model.named_buffers() if b.dtype == self._replica.x.dtype]
        at = 0
        for name, size in zip((*self._replica.names, *self._buffers), sizes, strict=True):
            if at == len(vector):
                return
            yield name, vector[at : at + size]
            at += size

    def _is_whole(self, name: str) -> bool:
        return self._origins[name][1].index is None

    def length(self, own: Tensor) -> Tensor:
        return self.square(own).sqrt().to(own)

    def norm(self, own: Mapping[str, Tensor], kind: float) -> Tensor:
        counting = [t for name, t in own.items() if self._counts or not self._is_whole(name)]
        norm = get_total_norm(counting, kind).double().reshape(1).cpu()
        if math.isinf(kind):
            self._comm.all_reduce(norm, "max")
        else:
            norm = norm**kind
            self._comm.all_reduce(norm)
            norm = norm ** (1 / kind)
        return norm.to(self._replica.x).reshape(())

    def make_alike(self, values: Tensor, *, counted: bool = True) -> None:
        whole = [piece for name, piece in self._pieces(values) if self._is_whole(name)]
        if self._within.size == 1 or not whole:
            return
        flat = torch.cat(whole)
        (self._within if counted else self._bare).broadcast(flat)
        for piece, told in zip(whole, torch.split(flat, [piece.numel() for piece in whole]), strict=True):
            piece.copy_(told)

    def fingerprint(self) -> str:
        return self._outline.fingerprint

    # Between the ranks

    def gathered(self, own: Tensor) -> list[Tensor]:
        if self._comm.rank:
            self._comm.isend(0, Message("part", (), (own,)), _TAG).wait()
            return []
        return [own, *(self._comm.recv(r, _TAG)[1].tensors[0] for r in range(1, self._comm.size))]

    def _assembled(self, own: Tensor, indices: list[Tensor]) -> Tensor:
        """One vector of the whole model; where several ranks have the same element, the first one's counts."""
        parts = self.gathered(own)
        if not parts:
            return own
        pairs = list(zip(indices, parts, strict=True))
        without_buffers = any(len(part) < len(index) for index, part in pairs)
        whole = own.new_zeros(self._outline.parameters if without_buffers else self._outline.numel)
        for index, part in reversed(pairs):
            whole[index[: len(part)]] = part.to(own.device)
        return whole

    def _gathered_rest(self, own: list[Tensor]) -> Tensors:
        """What is not trained, by name, on the first rank; where several have it, the first one's counts."""
        found: Tensors = {}
        for _, tensors in self._gathered_by_name("rest", dict(zip(self._rest, own, strict=True))):
            found = tensors | found
        return found

    def _gathered_by_name(self, mark: str, own: Tensors) -> list[tuple[str, Tensors]]:
        """Every rank's mark and tensors, on the first one; on the others their own."""
        comm = self._comm
        if comm.rank:
            comm.isend(0, Message(mark, (len(own),)), _TAG).wait()
            for name, tensor in own.items():
                comm.isend(0, Message(name, (), (tensor,)), _TAG).wait()
            return [(mark, own)]
        everyone = [(mark, own)]
        for r in range(1, comm.size):
            head = comm.recv(r, _TAG)[1]
            messages = [comm.recv(r, _TAG)[1] for _ in range(head.ints[0])]
            everyone.append((head.kind, {msg.kind: msg.tensors[0].clone() for msg in messages}))
        return everyone


def _sum_of_squares(vector: Tensor) -> Tensor:
    """In double precision, a piece at a time: the vector may be most of the memory that there is."""
    sums = [piece.double().square().sum() for piece in torch.split(vector, _PIECE)]
    return torch.stack(sums).sum().reshape(1).cpu() if sums else torch.zeros(1, dtype=torch.float64)


def _check_whole(state: dict[str, Any]) -> None:
    """Refuse a state in which a compressor has something that could not be put together."""
    together = state["kept"].get(_COMPRESSOR, {})
    if any(name not in together for _, tensors in state.get("alone", []) for name in tensors):
        raise UserError(_OTHER_LAYOUT)


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
