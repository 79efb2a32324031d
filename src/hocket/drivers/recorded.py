"""A call that is repeated on the CPU, as the operations that it comes down to: without what vmap and autograd do for
each of them, which for a small model takes as long as they do."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode

from hocket.core.errors import UserError

Call = Callable[[Tensor], Tensor]

CHECKED_EVERY = 64
"""Calls, of which one is made as it was and compared to the bit; so is the second."""
_AS_THEY_ARE = bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None)
_DEPENDS_ON_VALUES = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, every operation is written down as it is made."""

    def __init__(self, argument: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fits = True
        """False once something cannot be written down."""
        self.constants: list[Tensor] = []
        """What was there before, and views of it: memory that each call reads, or writes, anew."""
        self._graph = fx.Graph()
        self._first = self._graph.placeholder("argument")
        self._nodes = {id(argument): self._first}
        self._constant_ids: set[int] = set()
        self._alive: list[Any] = [argument]  # so that no two tensors have one id

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        self._alive.append((args, kwargs, found))
        if any(tag in func.tags for tag in _DEPENDS_ON_VALUES):
            self.fits = False
        if not self.fits:
            return found
        if func.is_view and isinstance(found, Tensor) and self._is_constant(args[0]):
            self._node_of(found)
            return found
        node = self._graph.call_function(func, *map_aggregate((args, kwargs), self._node_of))
        results = enumerate(found) if isinstance(found, tuple | list) else [(None, found)]
        for at, result in results:
            if isinstance(result, Tensor):
                self._nodes[id(result)] = (
                    node if at is None else self._graph.call_function(operator.getitem, (node, at))
                )
        return found

    def _is_constant(self, tensor: Tensor) -> bool:
        return id(tensor) in self._constant_ids or id(tensor) not in self._nodes

    def _node_of(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            self.fits = self.fits and isinstance(value, _AS_THEY_ARE)
            return value
        if id(value) not in self._nodes:
            with self._graph.inserting_before(self._first):
                self._nodes[id(value)] = self._graph.placeholder(f"constant_{len(self.constants)}")
            self._constant_ids.add(id(value))
            self.constants.append(value)
        return self._nodes[id(value)]

    def finished(self, found: Tensor) -> Call | None:
        """The operations as a function; None where they cannot be one."""
        if not self.fits or id(found) not in self._nodes:
            return None
        self._graph.output(self._nodes[id(found)])
        operations, constants = fx.GraphModule({}, self._graph).forward, self.constants

        def replay(argument: Tensor) -> Tensor:
            with torch.no_grad():
                result: Tensor = operations(*constants, argument)
            return result

        return replay


class Recorded:
    """`call`, with arguments of one shape. `written` is all that it changes in memory beside its result.

    The first call is recorded. The second one, and now and then a later one, is made both ways: what the recording
    missed, as it was no operation of PyTorch's, shows there. `confirm` does so whenever something may have changed, and
    a call that has is recorded anew.
    """

    def __init__(self, call: Call, *written: Tensor) -> None:
        self._call, self._written = call, written
        self._replay: Call | None = None
        self._calls = 0
        self._last = torch.empty(0)

    def __call__(self, argument: Tensor) -> Tensor:
        self._calls += 1
        self._last = argument
        if self._calls == 1:
            return self._record(argument)
        if self._replay is None:
            return self._call(argument)
        if self._calls == 2 or self._calls % CHECKED_EVERY == 0:
            return self._compare(self._replay, argument)
        return self._replay(argument)

    def _record(self, argument: Tensor) -> Tensor:
        recorder = Recorder(argument)
        with recorder:
            found = self._call(argument)
        self._replay = recorder.finished(found)
        return found

    def confirm(self) -> None:
        """Between two calls, when what they do may have changed. What was written is as before."""
        if self._replay is None:
            return
        before, generator = self._copies(), torch.get_rng_state()
        if not self._both_ways(self._replay, self._last)[1]:
            self._calls = 0
        torch.set_rng_state(generator)
        self._restore(before)

    def _compare(self, replay: Call, argument: Tensor) -> Tensor:
        found, is_same = self._both_ways(replay, argument)
        if not is_same and self._calls > 2:
            raise UserError(
                "the model, or its loss, computes something else than it did a few steps ago; use --engine sim --sim "
                "batched=off where that is meant to be"
            )
        if not is_same:
            self._replay = None
        return found

    def _both_ways(self, replay: Call, argument: Tensor) -> tuple[Tensor, bool]:
        """What the call gives, and whether the recording gives the same."""
        before, generator = self._copies(), torch.get_rng_state()
        replayed = [replay(argument), *self._copies()]
        torch.set_rng_state(generator)
        self._restore(before)
        found = self._call(argument)
        return found, all(_same(one, other) for one, other in zip(replayed, (found, *self._written), strict=True))

    def _copies(self) -> list[Tensor]:
        return [tensor.clone() for tensor in self._written]

    def _restore(self, before: list[Tensor]) -> None:
        for tensor, value in zip(self._written, before, strict=True):
            tensor.copy_(value)


def _same(one: Tensor, other: Tensor) -> bool:
    """To the bit, and what is not a number too."""
    as_bytes = [t.contiguous().view(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*as_bytes)
