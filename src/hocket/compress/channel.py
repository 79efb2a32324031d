"""Messages whose lossy parts travel encoded."""

from __future__ import annotations

import dataclasses
from enum import IntEnum

import torch
from torch import Tensor

from hocket.compress.memory import Memory, check_finite, plain
from hocket.compress.scheme import as_bytes, floats
from hocket.core.comm import ANY, Comm, Request
from hocket.core.forward import Forwarding
from hocket.core.message import Lossy, Message

MARK = "~"
"""Ends the kind of a message that has encoded parts: its last integers say which, and how long they are."""


class Form(IntEnum):
    """How a part of a message travels."""

    PLAIN = 0
    CHANGE = 1
    """Something to be added to what the receiver has; what was lost is added to the next."""
    DAMPED = 2
    """The same, where nothing is kept of what was lost: so it must not be more than there was."""
    FIRST = 3
    """A model as it is: what the next ones to the same rank are told apart from."""
    LATER = 4
    """A model's distance from what the receiver knows of it."""


class Compressed(Forwarding):
    """Decorates a communicator. Strategies do not know that it is there.

    Of a model, only its distance from what the receiver already knows is encoded, and both add to that what was sent
    (Koloskova 2019): what was lost is part of the next distance, so it needs no other memory.
    """

    def __init__(self, comm: Comm, memory: Memory, dtype: torch.dtype) -> None:
        super().__init__(comm)
        self._memory, self._dtype = memory, dtype
        self._overshoots = memory.scheme.variance > 0
        """As an unbiased compressor does. Then the share of what it says that comes nearest follows its bytes."""

    def around(self, comm: Comm) -> Comm:
        return Compressed(comm, self._memory, self._dtype)

    def seal(self, to: int, part: Lossy) -> Lossy:
        """The part encoded, with the values that the receiver will find."""
        if self._memory.exactly or part.packed:
            return part
        if part.is_model:
            return self._seal_model(to, part)
        block, sent = self._memory.encode(part.residual, part.values)
        if part.residual:
            return dataclasses.replace(part, values=sent, packed=(Form.CHANGE, block))
        block, sent = self._nearest(block, sent, part.values)
        return dataclasses.replace(part, values=sent, packed=(Form.DAMPED, block))

    def _seal_model(self, to: int, part: Lossy) -> Lossy:
        memory, known = self._memory, f"told/{to}/{part.residual}"
        scheme = memory.scheme.at(memory.step(known))
        check_finite(part.values, scheme, part.residual)
        if known not in memory.vectors:
            memory.vectors[known] = part.values.detach().clone()
            return dataclasses.replace(part, values=memory.vectors[known].clone(), packed=(Form.FIRST, part.values))
        distance = part.values - memory.vectors[known]
        with memory.spans("encode"):
            block = scheme.encode(plain(distance), memory.draw())
            block, step = self._nearest(block, memory.decode(block, distance), distance)
        return dataclasses.replace(part, values=self._moved(known, step), packed=(Form.LATER, block))

    def _moved(self, known: str, step: Tensor) -> Tensor:
        """A model after what was sent of its distance."""
        vectors = self._memory.vectors
        vectors[known] = vectors[known] + step
        return vectors[known].clone()

    def _nearest(self, block: Tensor, said: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The bytes of `x`, and what they stand for, where that must come nearer to it."""
        if not self._overshoots:
            return block, said
        length = float(said.double().square().sum())
        share = float(x.double().dot(said.double())) / length if length else 0.0
        block = torch.cat([block, as_bytes(torch.tensor([share]))])
        return block, self._read(block, said)

    def _read(self, block: Tensor, like: Tensor) -> Tensor:
        if not self._overshoots:
            return self._memory.decode(block, like)
        end = block.numel() - 4
        return self._memory.decode(block[:end], like) * float(floats(block, end, 1))

    def send(self, to: int, msg: Message, tag: int = 0) -> None:
        self.inner.send(to, self._encoded(to, msg), tag)

    def isend(self, to: int, msg: Message, tag: int = 0) -> Request:
        return self.inner.isend(to, self._encoded(to, msg), tag)

    def recv(self, source: int = ANY, tag: int = 0, timeout: float | None = None) -> tuple[int, Message]:
        sender, msg = self.inner.recv(source, tag, timeout)
        return sender, self._decoded(sender, msg) if msg.kind.endswith(MARK) else msg

    def _encoded(self, to: int, msg: Message) -> Message:
        sealed = [self.seal(to, part) if isinstance(part, Lossy) else part for part in msg.parts]
        packed = [part.packed if isinstance(part, Lossy) else None for part in sealed]
        if not any(packed):
            return msg
        forms = sum((found[0] if found else Form.PLAIN) << 3 * i for i, found in enumerate(packed))
        lengths = [len(part.values) for part in sealed if isinstance(part, Lossy) and part.packed]
        parts = tuple(found[1] if found else part for part, found in zip(sealed, packed, strict=True))
        return Message(msg.kind + MARK, (*msg.ints, *lengths, forms), parts, msg.posted_s)

    def _decoded(self, sender: int, msg: Message) -> Message:
        kind = msg.kind.removesuffix(MARK)
        forms = [msg.ints[-1] >> 3 * i & 7 for i in range(len(msg.tensors))]
        ints = list(msg.ints[: -1 - sum(form != Form.PLAIN for form in forms)])
        lengths = iter(msg.ints[len(ints) : -1])
        parts = []
        for i, (form, tensor) in enumerate(zip(forms, msg.tensors, strict=True)):
            known, part = f"heard/{sender}/{kind}/{i}", tensor
            if form == Form.FIRST:
                next(lengths)
                self._memory.vectors[known] = tensor.clone()
            elif form == Form.LATER:
                next(lengths)
                part = self._moved(known, self._read(tensor, self._memory.vectors[known]))
            elif form in (Form.CHANGE, Form.DAMPED):
                read = self._read if form == Form.DAMPED else self._memory.decode
                part = read(tensor, tensor.new_empty(next(lengths), dtype=self._dtype))
            parts.append(part)
        return Message(kind, tuple(ints), tuple(parts), msg.posted_s)
