"""Collectives of ranks on one host, through memory that all of them have mapped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hocket.core.comm import Op
from hocket.core.errors import CommError, DeadlineExceeded
from hocket.kernels.jit import one_compiles
from hocket.kernels.memory import meeting as kernels
from hocket.kernels.memory.block import Block

_ROWS_BYTES, _LONGEST_ROW, _SHORTEST_ROW = 64 << 20, 1 << 20, 1 << 16
_ROW_OF_TWO = 1 << 18
"""Two ranks go over a whole row of each other's, and not a slice: with their own and what it is added to, it should
stay in a core's own cache."""
SPIN_S, CROWDED_S = (1e-3, 2e-2), (2e-5, 2e-5)
"""How long a rank that waits keeps its core busy before it sleeps, at least and at most: to wake 16 sleepers takes
longer than to sum their vectors. Where others want the core, it offers them that meanwhile, and sleeps soon."""
BUSY_NS, FIRST_NS, LAST_NS = 20_000, 200_000, 20_000_000
"""How long it waits before it helps the library along: while that has something to do, at first, and in the end."""

_OPS: dict[Op, int] = {"sum": kernels.SUM, "mean": kernels.SUM, "max": kernels.MAX, "min": kernels.MIN}
_NAMES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier")
_EVERY_OP: tuple[Op, ...] = tuple(_OPS)
_LENGTH_BITS, _TYPE_BITS, _OPERATION_BITS = 44, 8, 3
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""What has no arithmetic of its own here is summed in this, and rounded once."""

KernelCall = Callable[[bool], int]


@dataclass(frozen=True)
class Patience:
    """How ranks wait for each other."""

    deadline_s: float
    crowded: bool
    """Whether there are more ranks than cores, so that who waits had better sleep."""
    help_along: Callable[[], bool] | None = None
    """For a library whose messages travel only while somebody calls it: does so, and tells whether any are under way.

    A rank that has sent something and waits for others here may be what these wait for."""


def row_bytes(size: int, room: int = _ROWS_BYTES) -> int:
    """What a rank lays down at a time: much, since all have to meet for it, but rows should fit into the caches."""
    longest = _ROW_OF_TWO if size == 2 else _LONGEST_ROW
    return max(min(longest, min(room, _ROWS_BYTES) // (2 * size)) // 64 * 64, _SHORTEST_ROW)


def nbytes(size: int, room: int = _ROWS_BYTES) -> int:
    """Of the block that so many ranks need, where there is so much room for it."""
    return 8 * _words(size) + 2 * size * row_bytes(size, room)


def _words(size: int) -> int:
    return -(-kernels.words_for(size) // 512) * 512  # rows begin with a page


def load_kernels() -> None:
    """Compile what the collectives call, or load it from the cache: before anybody waits for us."""
    alone = Commons(Block.anonymous(nbytes(1)), 1, 0, Patience(1.0, crowded=False))
    alone.lay_out()
    with one_compiles():
        for dtype in (torch.float32, torch.float64, torch.int64):
            alone.all_reduce(torch.zeros(0, dtype=dtype), "sum")
        alone.broadcast(torch.zeros(0), 0)
        alone.all_gather(torch.zeros(0), torch.zeros(0))
        alone.barrier()


class Commons:
    """A block of shared memory with a place for each of `size` ranks, as one of them sees it.

    Tensors lie in one piece in main memory. Types are those of NumPy, and half floats.
    """

    def __init__(self, block: Block, size: int, rank: int, patience: Patience) -> None:
        self._block, self._size, self._rank, self._patience = block, size, rank, patience
        self._control: NDArray[np.int64] = np.frombuffer(block.memory, np.int64, _words(size))
        self._slice = kernels.RANK_AREA + rank * kernels.RANK_WORDS + kernels.SLICE
        self._control[self._slice] = FIRST_NS if patience.help_along else 0
        self._rows: dict[np.dtype[np.generic], NDArray[np.generic]] = {}

    def lay_out(self) -> None:
        """Make a new block ready, before any other rank sees it."""
        shortest_s, longest_s = CROWDED_S if self._patience.crowded else SPIN_S
        self._control[kernels.SIZE] = self._size
        self._control[kernels.CROWDED] = self._patience.crowded
        self._control[kernels.SHORTEST_SPIN_NS] = round(shortest_s * 1e9)
        self._control[kernels.LONGEST_SPIN_NS] = round(longest_s * 1e9)
        self._control[kernels.DEADLINE_NS] = round(self._patience.deadline_s * 1e9)

    def all_reduce(self, x: Tensor, op: Op) -> None:
        if x.dtype in _WIDER:
            wide = x.to(_WIDER[x.dtype])
            self.all_reduce(wide, op)
            x.copy_(wide)
            return
        values = x.view(-1).numpy()
        rows = self._rows_of(values.dtype)
        mark = _mark(0, values, op)

        def call(again: bool) -> int:
            code: int = kernels.all_reduce(self._control, rows, self._rank, values, _OPS[op], mark, again)
            return code

        self._finish(call, 0)
        if op == "mean":
            x /= self._size

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op) -> None:
        if x.dtype in _WIDER:
            wide = out.to(_WIDER[x.dtype])
            self.reduce_scatter(wide, x.to(_WIDER[x.dtype]), op)
            out.copy_(wide)
            return
        given, got = x.view(-1).numpy(), out.view(-1).numpy()
        rows, mark = self._rows_of(got.dtype), _mark(1, given, op)

        def call(again: bool) -> int:
            code: int = kernels.reduce_scatter(self._control, rows, self._rank, given, got, _OPS[op], mark, again)
            return code

        self._finish(call, 1)
        if op == "mean":
            out /= self._size

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        given, got = _bytes(x), _bytes(out)
        rows, mark = self._rows_of(got.dtype), _mark(2, given)

        def call(again: bool) -> int:
            code: int = kernels.all_gather(self._control, rows, self._rank, given, got, mark, again)
            return code

        self._finish(call, 2)

    def broadcast(self, x: Tensor, root: int) -> None:
        values = _bytes(x)
        rows, mark = self._rows_of(values.dtype), _mark(3, values)

        def call(again: bool) -> int:
            code: int = kernels.broadcast(self._control, rows, self._rank, values, root, mark, again)
            return code

        self._finish(call, 3)

    def barrier(self) -> None:
        def call(again: bool) -> int:
            code: int = kernels.barrier(self._control, self._rank, 4 << _LENGTH_BITS + _TYPE_BITS, again)
            return code

        self._finish(call, 4)

    def _finish(self, call: KernelCall, operation: int) -> None:
        """Call a kernel, and again when its wait ended for a moment: for Python to see to a signal, or for us to help
        the library along."""
        code = call(False)
        if code == kernels.MET:
            return
        help_along, slice_ns = self._patience.help_along, FIRST_NS
        while code != kernels.MET:
            self._check(code, operation)
            if help_along is not None:
                slice_ns = BUSY_NS if help_along() else min(max(2 * slice_ns, FIRST_NS), LAST_NS)
                self._control[self._slice] = slice_ns
            code = call(True)
        self._control[self._slice] = FIRST_NS if help_along is not None else 0

    def _check(self, code: int, operation: int) -> None:
        """Raise unless the wait was only interrupted."""
        if code == kernels.LATE:
            raise DeadlineExceeded(self._rank, _NAMES[operation], self._missing(), self._patience.deadline_s)
        if code == kernels.APART:
            raise CommError(f"{self._apart()}; all ranks must call the same collectives in the same order")

    def _missing(self) -> str:
        came = self._words_of_all(kernels.CAME)
        late = [str(rank) for rank, count in enumerate(came) if count < came[self._rank]]
        return f"rank{'s' if len(late) > 1 else ''} {', '.join(late)}" if late else "the other ranks"

    def _apart(self) -> str:
        """Which two ranks do different things at this rank's last meeting."""
        meeting = self._words_of_all(kernels.CAME)[self._rank]
        marks = self._words_of_all(kernels.MARKS + (meeting & 1))
        other = next(rank for rank, mark in enumerate(marks) if mark != marks[self._rank])
        here, there = (f"rank {rank} in {_told(marks[rank])}" for rank in (self._rank, other))
        return f"{here}, {there}"

    def _words_of_all(self, word: int) -> list[int]:
        words: list[int] = self._control[kernels.RANK_AREA :].tolist()
        return [words[rank * kernels.RANK_WORDS + word] for rank in range(self._size)]

    def _rows_of(self, dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
        """The ranks' rows: those for the meetings of even numbers, then the others."""
        rows = self._rows.get(dtype)
        if rows is None:
            begin = 8 * _words(self._size)
            rows = np.frombuffer(self._block.memory, dtype, offset=begin).reshape(2 * self._size, -1)
            self._rows[dtype] = rows
        return rows


def _bytes(x: Tensor) -> NDArray[np.uint8]:
    """For what only travels, types do not matter."""
    return x.view(-1).view(torch.uint8).numpy()


def _mark(operation: int, values: NDArray[np.generic], op: Op = "sum") -> int:
    """What a rank does, as a number."""
    how = _EVERY_OP.index(op) << _OPERATION_BITS | operation
    return (how << _TYPE_BITS | ord(values.dtype.char)) << _LENGTH_BITS | values.size


def _told(mark: int) -> str:
    length, kind = mark & (1 << _LENGTH_BITS) - 1, mark >> _LENGTH_BITS
    op, operation = divmod(kind >> _TYPE_BITS, 1 << _OPERATION_BITS)
    name, dtype = _NAMES[operation], np.dtype(chr(kind & (1 << _TYPE_BITS) - 1))
    what = f"{length} {dtype}" if op == 0 else f"{length} {dtype} ({_EVERY_OP[op]})"
    return name if name == "barrier" else f"{name} of {what}"
