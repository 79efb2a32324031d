"""A model that was never made: how to make each of its tensors, so that a rank need not have all of them at once.

The function that makes the model runs once, with tensors that have shapes and no memory; what it does to them is
written down. Each tensor is made later by doing again what was done to it, with the random numbers that it had.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from hocket.core.errors import shown

META = torch.device("meta")


class CannotRecord(Exception):
    """A function does what only real tensors can; then all of the model is made at once."""


class View(NamedTuple):
    """A tensor without memory: which part of which storage it is."""

    storage: torch.UntypedStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        storage = tensor.untyped_storage()
        return cls(storage, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    @property
    def key(self) -> int:
        return int(self.storage._cdata)

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """The same part of real memory."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class Step:
    """One operation, its tensors as views or, where they were real, as they were."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Any
    random: Tensor | None
    """The state of the generator that it drew from."""

    @property
    def views(self) -> list[View]:
        leaves = tree_leaves((self.args, self.kwargs, self.results), is_leaf=_is_view)
        return [leaf for leaf in leaves if isinstance(leaf, View)]

    def again(self, memory: dict[int, torch.UntypedStorage]) -> None:
        def real(value: Any) -> Any:
            return value.on(memory[value.key]) if isinstance(value, View) else value

        args, kwargs = tree_map(real, (self.args, self.kwargs), is_leaf=_is_view)
        function = self.function
        if self.random is not None:
            function = function.overloadpacket
            kwargs |= {"generator": torch.Generator()}
            kwargs["generator"].set_state(self.random)
        made = tree_leaves(function(*args, **kwargs))
        for view, tensor in zip(tree_leaves(self.results, is_leaf=_is_view), made, strict=True):
            if isinstance(view, View) and view.key not in memory:
                assert (view.stride, view.offset) == (tensor.stride(), tensor.storage_offset())
                memory[view.key] = tensor.untyped_storage()


def _is_view(value: Any) -> bool:
    return isinstance(value, View)


class AsIfReal(TorchFunctionMode):
    """Inside, tensors without memory say that they have some: PyTorch's initialisers leave out the others."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == Tensor.is_meta.__get__:  # type: ignore[attr-defined]  # a property, whatever its stub says
            return False
        if func == Tensor.device.__get__:
            return torch.device("cpu")
        return func(*args, **kwargs or {})


class Recorder(TorchDispatchMode):
    """Inside, new tensors have no memory, and what happens to them is written down."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Step] = []
        self.made: list[weakref.ref[Tensor]] = []
        self._scratch = torch.empty(0).untyped_storage()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == META:  # PyTorch asks for where another tensor is
            kwargs["device"] = torch.device("cpu")
        makes = any(argument.name == "device" for argument in func._schema.arguments)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not makes and not any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        random = self._draw(func, args, kwargs) if torch.Tag.nondeterministic_seeded in func.tags else None
        in_shape, by_name = tree_map_only(Tensor, lambda t: t.to(META), (args, kwargs))
        results = func(*in_shape, **by_name | ({"device": META} if makes else {}))
        for value in tree_leaves(results):
            if not isinstance(value, Tensor) or not value.is_meta:
                raise CannotRecord(f"{func} gives a value")
            self.made.append(weakref.ref(value))
        written_args, written_kwargs, written_results = tree_map_only(Tensor, _written, (args, kwargs, results))
        self.steps.append(Step(func, written_args, written_kwargs, written_results, random))
        return results

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Use up the random numbers that an operation takes, on tensors that are then forgotten."""
        overloads = [getattr(func.overloadpacket, name) for name in func.overloadpacket.overloads()]
        if not any(a.name == "generator" for overload in overloads for a in overload._schema.arguments):
            raise CannotRecord(f"{func} takes no generator")
        state: Tensor = (kwargs.get("generator") or torch.default_generator).get_state()
        real_args, real_kwargs = tree_map_only(
            Tensor, lambda t: self._stand_in(t) if t.is_meta else t.clone(), (args, kwargs)
        )
        func(*real_args, **real_kwargs)
        return state

    def _stand_in(self, tensor: Tensor) -> Tensor:
        """A real tensor of the same shape, in memory that all of them have in turn."""
        view = View.of(tensor)._replace(offset=0)
        last = sum((size - 1) * stride for size, stride in zip(view.size, view.stride, strict=True))
        if self._scratch.nbytes() < (last + 1) * tensor.element_size():
            self._scratch = torch.empty(last + 1, dtype=tensor.dtype).untyped_storage()
        return view.on(self._scratch).fill_(1)


def _written(tensor: Tensor) -> View | Tensor:
    return View.of(tensor) if tensor.is_meta else tensor.clone()


class Blueprint:
    """Of a model. `model` has all its modules, and tensors without memory."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        recorder = Recorder()
        with recorder, AsIfReal():
            self.model = make()
        self._named = dict(chain(self.model.named_parameters(), self.model.named_buffers()))
        self._check_held(recorder.made)
        self._steps = _grouped(recorder.steps)

    def _check_held(self, made: list[weakref.ref[Tensor]]) -> None:
        """Refuse tensors that somebody holds in places of their own, and parameters that share memory."""
        gc.collect()
        known = {id(tensor) for tensor in self._named.values()}
        if any((tensor := ref()) is not None and id(tensor) not in known for ref in made):
            raise CannotRecord("the model has tensors that are no parameters and no buffers")
        places = [View.of(tensor).key for tensor in self._named.values() if tensor.is_meta]
        if len(set(places)) < len(places):
            raise CannotRecord("parameters share memory")

    @property
    def names(self) -> list[str]:
        """Of all parameters and buffers."""
        return list(self._named)

    def blank(self, name: str) -> Tensor:
        """Room for one of them."""
        return torch.empty(self._named[name].shape, dtype=self._named[name].dtype)

    def tensor(self, name: str) -> Tensor:
        """Make one of the model's tensors, as the function would have made it."""
        wanted = self._named[name].detach()
        if not wanted.is_meta:
            return wanted
        view, memory = View.of(wanted), dict[int, torch.UntypedStorage]()
        with torch.no_grad():
            for step in self._steps[view.key]:
                step.again(memory)
        return view.on(memory[view.key])


def give_memory(module: nn.Module) -> None:
    """To all tensors of a module, without values. One that is used in several places stays one."""
    parameters = {
        p: nn.Parameter(torch.empty_like(p, device="cpu"), p.requires_grad) for p in module.parameters() if p.is_meta
    }
    buffers = {b: torch.empty_like(b, device="cpu") for b in module.buffers() if b.is_meta}
    for each in module.modules():
        each._parameters |= {n: parameters[p] for n, p in each._parameters.items() if p in parameters}
        each._buffers |= {n: buffers[b] for n, b in each._buffers.items() if b in buffers}


def _grouped(steps: list[Step]) -> dict[int, list[Step]]:
    """For each storage the steps that had to do with it, or with one that it had to do with."""
    groups: dict[int, list[Step]] = {}
    order = {id(step): number for number, step in enumerate(steps)}
    for step in steps:
        keys = {view.key for view in step.views}
        together = [step]
        for group in {id(groups[key]): groups[key] for key in keys if key in groups}.values():
            together += group
        together.sort(key=lambda each: order[id(each)])
        moved = {view.key for each in together for view in each.views}
        groups |= dict.fromkeys(moved, together)
    return groups


def blueprint_of(make: Callable[[], nn.Module]) -> Blueprint:
    """Of the model that a function makes. Raises CannotRecord if it does something that cannot be done later."""
    try:
        return Blueprint(make)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:  # as tensors without memory raise them
        raise CannotRecord(shown(error)) from error
