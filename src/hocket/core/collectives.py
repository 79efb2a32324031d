"""All-reduce written out in messages, so that its steps can be watched, drawn and priced.

n bytes on p ranks; alpha is a message's latency, beta the time of a byte.
Each of these leaves the same bits on every rank: a sum is computed once and then only copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from hocket.core.comm import Comm, Op
from hocket.core.message import Message

_TAG = 7001  # apart from a strategy's own messages


def ring(comm: Comm, x: Tensor) -> None:
    """Sum in place, in a ring: 2 (p - 1) alpha + 2 (p - 1)/p n beta.

    The vector is cut into as many chunks as there are ranks. Share-reduce: each chunk travels once around
    the ring and collects the sum. Share-only: the finished chunks travel around once more.
    """
    p, me = comm.size, comm.rank
    right, left = (me + 1) % p, (me - 1) % p
    chunk = x.tensor_split(p)  # works for vectors shorter than the ring: some chunks are empty
    for step in range(p - 1):
        received = _exchange(comm, "share-reduce", right, chunk[(me - step) % p], left)
        chunk[(me - step - 1) % p].add_(received)
    for step in range(p - 1):
        received = _exchange(comm, "share-only", right, chunk[(me + 1 - step) % p], left)
        chunk[(me - step) % p].copy_(received)


def halving(comm: Comm, x: Tensor) -> None:
    """Sum in place, by recursive halving and doubling (Rabenseifner): 2 log p alpha + 2 (p - 1)/p n beta.

    In each round partners trade halves of what they are still responsible for, until each holds the sum of its
    own part; then the parts are gathered the way back. Ranks beyond the largest power of two hand their vector
    to a partner first and get the result back in the end.
    """
    p, me = comm.size, comm.rank
    core = 1 << (p.bit_length() - 1)
    if me >= core:
        comm.send(me - core, Message("fold", (), (x,)), _TAG)
        x.copy_(comm.recv(me - core, _TAG)[1].tensors[0])
        return
    if me + core < p:
        x.add_(comm.recv(me + core, _TAG)[1].tensors[0])
    low, high = 0, x.numel()
    trail = []
    distance = core // 2
    while distance:
        partner = me ^ distance
        middle = (low + high) // 2
        mine, theirs = ((low, middle), (middle, high)) if me < partner else ((middle, high), (low, middle))
        received = _exchange(comm, "share-reduce", partner, x[slice(*theirs)], partner)
        x[slice(*mine)].add_(received)
        trail.append((partner, mine, theirs))
        low, high = mine
        distance //= 2
    for partner, mine, theirs in reversed(trail):
        x[slice(*theirs)].copy_(_exchange(comm, "share-only", partner, x[slice(*mine)], partner))
    if me + core < p:
        comm.send(me + core, Message("unfold", (), (x,)), _TAG)


def tree(comm: Comm, x: Tensor) -> None:
    """Sum in place, up and down a binomial tree: 2 log p (alpha + n beta)."""
    p, me = comm.size, comm.rank
    distance = 1
    while distance < p and not me & distance:
        if me + distance < p:
            x.add_(comm.recv(me + distance, _TAG)[1].tensors[0])
        distance *= 2
    if me:
        parent = me - distance
        comm.send(parent, Message("share-reduce", (), (x,)), _TAG)
        x.copy_(comm.recv(parent, _TAG)[1].tensors[0])
    while distance > 1:
        distance //= 2
        if me + distance < p:
            comm.send(me + distance, Message("share-only", (), (x,)), _TAG)


def _exchange(comm: Comm, kind: str, to: int, part: Tensor, source: int) -> Tensor:
    """Send a part to one neighbour while receiving one from another."""
    sending = comm.isend(to, Message(kind, (), (part,)), _TAG)
    _, received = comm.recv(source, _TAG)
    sending.wait()
    return received.tensors[0]


def native(comm: Comm, x: Tensor) -> None:
    """Sum in place, by the engine's library."""
    comm.native.all_reduce(x)


def auto(comm: Comm, x: Tensor) -> None:
    """Sum in place, by the engine's best means: through memory among ranks of one host, by its library elsewhere."""
    comm.all_reduce(x)


Algorithm = Literal["auto", "native", "ring", "halving", "tree"]
"""How a sum over all ranks is formed."""

ALGORITHMS: dict[Algorithm, Callable[[Comm, Tensor], None]] = {
    "auto": auto, "native": native, "ring": ring, "halving": halving, "tree": tree
}  # fmt: skip


def by(algorithm: Algorithm, comm: Comm, x: Tensor, op: Op = "sum") -> None:
    """The sum or the mean, in place, by one of them."""
    ALGORITHMS[algorithm](comm, x)
    if op == "mean":
        x.div_(comm.size)
