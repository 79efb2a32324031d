"""Notices what would let the workers' replicas drift apart in a user's loop, where nobody would see it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from hocket.core.errors import UserError
from hocket.core.replica import Replica
from hocket.drivers.session import Session

OFTEN = 128
"""Steps between two looks, after the first steps."""


class Watch:
    """Of one model and its optimizer, from `begin` to `end`."""

    def __init__(self, replica: Replica, optimizer: torch.optim.Optimizer) -> None:
        self._replica, self._optimizer = replica, optimizer
        self._parameters = {id(p) for p in replica.parameters}
        self._memory = [(p.dtype, p.data_ptr()) for p in replica.parameters]
        self._ours = threading.local()
        self._handles: list[RemovableHandle] = []

    def begin(self, model: nn.Module) -> None:
        self._handles.append(register_optimizer_step_pre_hook(self._someone_steps))
        modules: list[Any] = list(model.modules())
        self._handles += [module.register_state_dict_post_hook(_own_bytes) for module in modules]

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Inside, it is the strategy that steps."""
        self._ours.steps = True
        try:
            yield
        finally:
            self._ours.steps = False

    def _someone_steps(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if getattr(self._ours, "steps", False):
            return
        if any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"]):
            raise UserError(
                "an optimizer that is not the prepared one steps the prepared model, so the workers would come apart; "
                "make the optimizer first, then call team.prepare(model, optimizer)"
            )

    def is_due(self, step: int) -> bool:
        """Whether to look after this step: often in the beginning, where mistakes show."""
        return step % OFTEN == 0 or (step < OFTEN and step & (step - 1) == 0)

    def look(self, model: nn.Module) -> None:
        """Refuse a model that is no longer the one that was prepared."""
        trained = {id(p) for p in model.parameters() if p.requires_grad}
        now = dict(model.named_parameters())
        for name, p, memory in zip(self._replica.names, self._replica.parameters, self._memory, strict=True):
            if now.get(name) is not p or (p.dtype, p.data_ptr()) != memory:
                raise UserError(
                    f"{name} was replaced after team.prepare, by a cast, a move to a device or an assignment; do that "
                    f"before team.prepare (model.load_state_dict without assign=True is fine)"
                )
            if id(p) not in trained:
                raise UserError(f"{name} was frozen after team.prepare; freeze and unfreeze before it")
        for name, p in now.items():
            if p.requires_grad and id(p) not in self._parameters:
                raise UserError(
                    f"{name} was unfrozen or added after team.prepare, so each worker would train its own; do that "
                    f"before team.prepare"
                )
        if any(id(p) not in {id(q) for q in now.values()} for g in self._optimizer.param_groups for p in g["params"]):
            raise UserError("the optimizer got parameters that the prepared model has not; prepare their model too")

    def compare(self, session: Session) -> None:
        """Refuse replicas that differ where they must not. All workers call it together."""
        with session.rank.clock.paused():
            compare_replicas(session, self._replica, f"after step {session.worker.step}")


def compare_replicas(session: Session, replica: Replica, when: str) -> None:
    """One sum of bits a parameter tells whether it is the same everywhere."""
    group = session.group
    if group.size == 1:
        return
    names, sums = _sums(replica)
    everyone = torch.zeros(group.size * len(sums), dtype=torch.int64)
    group.all_gather(everyone, sums)
    rows = everyone.view(group.size, -1)
    for rank in range(1, group.size):
        if differing := (rows[rank] != rows[0]).nonzero().flatten().tolist():
            more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
            raise UserError(
                f"{when}, {names[differing[0]]}{more} of rank {rank} differs from rank 0's: something changed weights, "
                f"the optimizer or its rate on one rank alone (a checkpoint loaded after team.prepare, a scheduler fed "
                f"with a rank's own loss, an 'if team.rank == 0')"
            )


def _sums(replica: Replica) -> tuple[list[str], Tensor]:
    named = [*zip(replica.names, replica.places, strict=True)]
    named += [(name, p.data) for name, p in replica.model.named_parameters() if not p.requires_grad]
    return [name for name, _ in named], torch.tensor([_bits(tensor) for _, tensor in named], dtype=torch.int64)


def _bits(tensor: Tensor) -> int:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = tensor.contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return int(flat.view(kinds[flat.element_size()]).sum(dtype=torch.int64))


def _own_bytes(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """What is saved from a state dict shall be the tensors named in it, not the block that they lie in."""
    for name in (*module._parameters, *module._buffers):
        tensor = state.get(prefix + name)
        if (
            isinstance(tensor, Tensor)
            and not tensor.requires_grad  # keep_vars=True: who asks for the parameters themselves gets them
            and tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
        ):
            state[prefix + name] = tensor.clone(memory_format=torch.preserve_format)
