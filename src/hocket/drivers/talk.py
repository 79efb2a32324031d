"""What the workers of a user's own loop tell each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from hocket.core.comm import Comm, Op
from hocket.core.errors import CommError, UserError, shown
from hocket.drivers.checkpoint import pack_state, unpack_state

V = TypeVar("V")


class Talk(ABC):
    """Collectives of plain values and tensors; the workers meet in each of them."""

    size: int

    @property
    @abstractmethod
    def meeting(self) -> Comm:
        """Where the workers meet."""

    @abstractmethod
    def everyone(self) -> Comm:
        """Who hears a broadcast."""

    def broadcast(self, value: V, source: int = 0) -> V:
        """What rank `source` has: a tensor is filled in place, anything else made of numbers, text, tensors, lists and
        dicts is returned. The workers meet; before `prepare`, server ranks hear it too."""
        comm = self.everyone()
        with self.named("broadcast"):
            if isinstance(value, Tensor):
                _in_place(value, lambda x: comm.broadcast(x, source))
                return value
            packed = _packed(value) if comm.rank == source else torch.empty(0, dtype=torch.uint8)
            length = torch.tensor([packed.numel()])
            comm.broadcast(length, source)
            if comm.rank != source:
                packed = torch.empty(int(length), dtype=torch.uint8)
            comm.broadcast(packed, source)
            found: V = unpack_state(packed)["value"]
            return found

    def all_reduce(self, value: V, op: Op = "sum") -> V:
        """The sum (or `mean`, `max`, `min`) of all workers' values: a tensor, in place, or a number. They meet."""
        with self.named("all_reduce"):
            if isinstance(value, Tensor):
                if op == "mean" and not (value.is_floating_point() or value.is_complex()):
                    raise UserError(f"team.all_reduce: the mean of {value.dtype} is none; make it floating-point first")
                _in_place(value, lambda x: self.meeting.all_reduce(x, op))
                return value
            if not isinstance(value, (int, float)):
                raise UserError(f"team.all_reduce takes a tensor or a number, got {shown(value)}; see team.gather")
            whole = isinstance(value, int) and op != "mean"
            number = torch.tensor([value], dtype=torch.int64 if whole else torch.float64)
            self.meeting.all_reduce(number, op)
            return cast(V, number.item())

    def gather(self, value: V) -> list[V]:
        """Every worker's value, in order of rank, on every worker: tensors, numbers, text, lists, dicts. They meet."""
        with self.named("gather"):
            packed = _packed(value)
            lengths = torch.zeros(self.size, dtype=torch.int64)
            self.meeting.all_gather(lengths, torch.tensor([packed.numel()]))
            longest = int(lengths.max())
            everyone = torch.zeros(self.size * longest, dtype=torch.uint8)
            self.meeting.all_gather(everyone, torch.cat([packed, packed.new_zeros(longest - packed.numel())]))
            rows = everyone.view(self.size, longest)
            return [unpack_state(rows[r, : int(lengths[r])])["value"] for r in range(self.size)]

    def barrier(self) -> None:
        """Wait until all workers are here."""
        with self.named("barrier"):
            self.meeting.barrier()

    @contextmanager
    def named(self, what: str) -> Iterator[None]:
        """A wait that comes to nothing is blamed on what the user called."""
        try:
            yield
        except CommError as error:
            error.operation = f"team.{what}"  # type: ignore[attr-defined]
            raise


def _packed(value: Any) -> Tensor:
    try:
        return pack_state({"value": value})
    except TypeError as error:
        raise UserError(f"only tensors, numbers, text, lists and dicts can be sent: {error}") from None


def _in_place(x: Tensor, collective: Callable[[Tensor], None]) -> None:
    """Collectives take whole stretches of memory that need no gradient."""
    whole = x.detach().contiguous()
    collective(whole)
    if whole.data_ptr() != x.data_ptr():
        with torch.no_grad():
            x.copy_(whole)
