"""Memory that workers on one machine share: threads of one process, or processes that map one file."""

from __future__ import annotations

import torch
from torch import Tensor

from hocket.core.comm import Comm
from hocket.core.errors import UserError
from hocket.core.sharing import Sharing, Statistics
from hocket.kernels.memory.vector import Block, SharedVector, nbytes


def load_kernels() -> None:
    """Compile what `Mapped` calls, or load it from the cache, by a life in little: before the clock starts."""
    sharing = Sharing("hogwild", 16, 1)
    mapped = Mapped(SharedVector.create(Block.anonymous(nbytes(sharing)), sharing), 0)
    x = torch.zeros(16)
    mapped.read(x)
    mapped.publish(x, 0.1)
    mapped.snapshot(x)


def in_one_process(sharing: Sharing, x: Tensor) -> SharedVector:
    """A vector for threads."""
    load_kernels()
    return _filled(Block.anonymous(nbytes(sharing)), sharing, x)


def between_processes(comm: Comm, sharing: Sharing, x: Tensor) -> Mapped:
    """A vector for the ranks of `comm`, each of which is a process. Its file has no name once all have mapped it."""
    load_kernels()
    block: Block | None = None
    path = torch.zeros(256, dtype=torch.uint8)
    if comm.rank == 0:
        block = Block.create(nbytes(sharing))
        _filled(block, sharing, x)
        name = str(block.path).encode()
        path[: len(name)] = torch.frombuffer(bytearray(name), dtype=torch.uint8)
    try:
        comm.broadcast(path)
        if block is None:
            block = _attach(bytes(path.tolist()).rstrip(b"\0").decode(), sharing)
        comm.barrier()
    finally:
        if block is not None:
            block.unlink()
    return Mapped(SharedVector(block, sharing), comm.rank)


def _attach(path: str, sharing: Sharing) -> Block:
    try:
        return Block.attach(path)
    except FileNotFoundError:
        raise UserError(
            f"strategy {sharing.method} shares memory, which all workers must see: run them on one machine"
        ) from None


def _filled(block: Block, sharing: Sharing, x: Tensor) -> SharedVector:
    if x.dtype != torch.float32 or x.device.type != "cpu":  # `train` refuses this before; a user's own loop may not
        raise UserError(
            f"strategy {sharing.method} shares float32 parameters in main memory; got {x.dtype}, {x.device}"
        )
    vector = SharedVector.create(block, sharing)
    vector.set(x.detach().numpy())
    return vector


class Mapped:
    """A shared vector as one worker sees it."""

    def __init__(self, vector: SharedVector, worker: int) -> None:
        self.vector, self.worker = vector, worker

    def read(self, out: Tensor) -> None:
        self.vector.read(self.worker, out.detach().numpy())

    def publish(self, g: Tensor, lr: float) -> bool:
        return self.vector.publish(self.worker, g.detach().numpy(), lr)

    def snapshot(self, out: Tensor) -> None:
        self.vector.snapshot(out.detach().numpy())

    def statistics(self) -> Statistics:
        return self.vector.statistics()
