"""Memory that workers on one machine share: threads of one process, or processes that map one file."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hocket.core.comm import Comm
from hocket.core.errors import UserError
from hocket.core.sharing import Sharing
from hocket.kernels.memory.block import Block
from hocket.kernels.memory.vector import MappedVector, nbytes


def load_kernels() -> None:
    """Compile what a `MappedVector` calls, or load it from the cache, by a life in little: before the clock starts."""
    x = torch.zeros(16)
    vector = MappedVector.create(Sharing("hogwild", 16, 1), x)
    vector.read(x)
    vector.publish(x, 0.1)
    vector.snapshot(x)


def between_processes(comm: Comm, sharing: Sharing, x: Tensor) -> MappedVector:
    """A vector for the ranks of `comm`, each of which is a process."""
    load_kernels()
    try:
        block = map_together(comm, nbytes(sharing), lambda block: MappedVector.create(sharing, x, block))
    except FileNotFoundError:
        raise UserError(
            f"strategy {sharing.method} shares memory, which all workers must see: run them on one machine"
        ) from None
    return MappedVector(block, sharing, comm.rank)


def map_together(comm: Comm, nbytes: int, fill: Callable[[Block], object]) -> Block:
    """Memory that rank 0 makes and fills, and all ranks map. Its file has no name once they have."""
    block: Block | None = None
    path = torch.zeros(256, dtype=torch.uint8)
    try:
        if comm.rank == 0:
            block = Block.create(nbytes)
            fill(block)
            name = str(block.path).encode()
            path[: len(name)] = torch.frombuffer(bytearray(name), dtype=torch.uint8)
        comm.broadcast(path)
        block = block or Block.attach(bytes(path.tolist()).rstrip(b"\0").decode())
        comm.barrier()
    finally:
        if block is not None:
            block.unlink()
    return block
