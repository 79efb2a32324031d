"""Memory that workers on one machine share: threads of one process, or processes that map one file."""

from __future__ import annotations

import torch
from torch import Tensor

from hocket.core.comm import Comm
from hocket.core.errors import UserError
from hocket.core.sharing import Sharing
from hocket.kernels.memory.vector import Block, MappedVector, nbytes


def load_kernels() -> None:
    """Compile what a `MappedVector` calls, or load it from the cache, by a life in little: before the clock starts."""
    x = torch.zeros(16)
    vector = MappedVector.create(Sharing("hogwild", 16, 1), x)
    vector.read(x)
    vector.publish(x, 0.1)
    vector.snapshot(x)


def between_processes(comm: Comm, sharing: Sharing, x: Tensor) -> MappedVector:
    """A vector for the ranks of `comm`, each of which is a process. Its file has no name once all have mapped it."""
    load_kernels()
    block: Block | None = None
    path = torch.zeros(256, dtype=torch.uint8)
    try:
        if comm.rank == 0:
            block = Block.create(nbytes(sharing))
            MappedVector.create(sharing, x, block)
            name = str(block.path).encode()
            path[: len(name)] = torch.frombuffer(bytearray(name), dtype=torch.uint8)
        comm.broadcast(path)
        if block is None:
            block = _attach(bytes(path.tolist()).rstrip(b"\0").decode(), sharing)
        comm.barrier()
    finally:
        if block is not None:
            block.unlink()
    return MappedVector(block, sharing, comm.rank)


def _attach(path: str, sharing: Sharing) -> Block:
    try:
        return Block.attach(path)
    except FileNotFoundError:
        raise UserError(
            f"strategy {sharing.method} shares memory, which all workers must see: run them on one machine"
        ) from None
