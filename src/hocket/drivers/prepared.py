"""One model and its optimizer under a strategy, in a loop that is the user's own."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from hocket import optim
from hocket.core.errors import UserError
from hocket.core.replica import Replica
from hocket.core.serving import Server
from hocket.core.weight import Weight
from hocket.drivers.checkpoint import pack_state, unpack_state
from hocket.drivers.early import Early
from hocket.drivers.judge import mean_replica
from hocket.drivers.session import Session
from hocket.drivers.watch import Watch
from hocket.layouts.portion import Portion
from hocket.measure.sometimes import Sometimes


class Prepared:
    """The optimizer stays the user's object, so that schedulers and checkpoints go on working: only its `step` and
    `zero_grad` are replaced, until `release`."""

    def __init__(
        self,
        session: Session,
        replica: Replica,
        portion: Portion,
        optimizer: torch.optim.Optimizer,
        within: Sometimes | None = None,
    ) -> None:
        self.session, self.replica, self.portion, self.optimizer = session, replica, portion, optimizer
        self.model, self._within = replica.model, within
        self.watch = Watch(self.replica, optimizer)
        self.unweighed: float | None = None
        """Samples since the last step; None if nobody counts them."""
        self.samples = 0
        """Those that the strategy was given."""
        self._clip: Callable[[], None] | None = None
        self.early: Early | None = None
        """Where a strategy sends parts of a gradient before the step."""
        self._stepped_s = 0.0
        """When the last step was over."""

    def begin(self) -> None:
        """Everyone gets rank 0's weights and its optimizer's state."""
        self.session.begin(self.replica, self.portion)
        self._share_optimizer()

    def _share_optimizer(self) -> None:
        """Rank 0 may have loaded a checkpoint alone."""
        comm, optimizer = self.session.rank.comm, self.optimizer
        with self.session.rank.clock.paused():
            filled = torch.tensor([int(bool(optimizer.state))])
            comm.broadcast(filled)
            if not filled:
                return
            packed = pack_state(optimizer.state_dict()) if comm.rank == 0 else torch.empty(0, dtype=torch.uint8)
            length = torch.tensor([packed.numel()])
            comm.broadcast(length)
            if comm.rank:
                packed = torch.empty(int(length), dtype=torch.uint8)
            comm.broadcast(packed)
            if comm.rank:
                optimizer.load_state_dict(unpack_state(packed))

    def serve(self) -> Server:
        """A server steps as the user's optimizer would: with it, where it holds the whole model, else with parts."""
        session, replica, optimizer = self.session, self.replica, self.optimizer
        if session.group.size > 1:
            optimizer = optim.of_part(optimizer, replica, session.span())
        x, g = session.part_of(replica.x), session.part_of(replica.g)
        return session.serve(x, g, optimizer, optimizer.step)

    # The life of a worker

    def work(self) -> None:
        """From now on, `optimizer.step()` is a step of the strategy."""
        optimizer, session = self.optimizer, self.session
        original = optimizer.step
        loss: list[Any] = [None]
        needs_closure = isinstance(optimizer, torch.optim.LBFGS)

        def original_step() -> object:
            self._clip_now()
            with self.watch.stepping():
                return original(lambda: loss[0]) if needs_closure else original()

        session.work(optimizer, original_step)
        session.start()
        self.replica.spread()
        if session.worker.on_part is not None:
            self.early = Early(session.worker, session.rank.clock, self._weight)

        def step(_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            loss[0] = None
            session.rank.status.stop()
            if closure is not None:
                with torch.enable_grad():
                    loss[0] = closure()
            if self.early is None:
                session.rank.clock.charge(1.0)
            self._draw_gradient()
            if not self._overflowed():
                optimizer._opt_called = True  # type: ignore[attr-defined] # what a scheduler goes by; servers may step
                self._step()
            self._stepped_s = session.rank.clock.now()
            return loss[0]

        def zero_grad(_: torch.optim.Optimizer, set_to_none: bool = True) -> None:
            self.replica.collect()
            self.replica.zero_grad()

        # A scheduler that was made before has wrapped `original`, and looks for its mark.
        if hasattr(original, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.zero_grad = types.MethodType(zero_grad, optimizer)  # type: ignore[method-assign]
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined] # see _overflowed
        self.watch.begin(self.model)
        self._stepped_s = session.rank.clock.now()

    def _draw_gradient(self) -> None:
        """What the user's loop has done since the last step, for who draws a timeline."""
        trace, now = self.session.trace, self.session.rank.clock.now()
        if trace.fine:
            trace.add("gradient", self._stepped_s, now, step=self.session.worker.step + 1)

    def _step(self) -> None:
        session, replica = self.session, self.replica
        due = self.watch.is_due(session.worker.step + 1)
        if due:
            self.watch.look(self.model)
        if self._steps_elsewhere():
            self._clip_now()
        gradient = session.worker.coming
        if self.early is not None:
            self.early.finish()
        else:
            replica.collect()
            gradient.weight = self._weight()
        self.unweighed = None
        self.samples += int(gradient.samples)
        if session.worker.step == 0 and gradient.samples and not replica.g.any():
            warnings.warn(
                "the first gradient is 0 in every parameter of the prepared model: was another one trained, such as a "
                "copy, or the one from before team.prepare?",
                stacklevel=5,
            )
        session.step(gradient)
        if due and session.strategy.alike:
            self.watch.compare(session)

    def _weight(self) -> Weight:
        """Of the gradient that is computed, or was."""
        return Weight(1.0 if self.unweighed is None else self.unweighed, None)

    def _overflowed(self) -> bool:
        """Whether a GradScaler has found gradients that are not finite, and the step is left out: by all ranks of a
        worker, and by all workers where they take their steps together. (An optimizer with this mark gets scale and
        finding, and steps by itself.)"""
        optimizer: Any = self.optimizer
        found: Tensor | None = getattr(optimizer, "found_inf", None)
        if found is None:
            return False
        if self.early is not None:
            raise UserError("a GradScaler changes gradients after backward, when they have left; use overlap=off")
        anywhere = found.detach().double().cpu().reshape(1)
        if self.session.strategy.lockstep:
            self.session.meeting.all_reduce(anywhere, "max")
        elif self.session.ensemble is not None:
            self.session.ensemble.all_reduce(anywhere, "max")
        scale: Tensor | None = optimizer.grad_scale
        if not anywhere and scale is not None:
            self.replica.collect()
            self.replica.unscale(scale)
        optimizer.found_inf = optimizer.grad_scale = None  # an optimizer that knows them would apply them again
        if anywhere:
            self.unweighed = None
            _tell_scaler(optimizer)
        return bool(anywhere)

    # Clipping

    def clip(self, parameters: list[nn.Parameter], max_norm: float, norm_type: float) -> Tensor:
        """Clip the gradient that the optimizer will see at the next step; the norm is known then."""
        norm, chosen = torch.zeros((), device=self.replica.x.device), {id(p) for p in parameters}
        named = [(n, p) for n, p in zip(self.replica.names, self.replica.parameters, strict=True) if id(p) in chosen]

        def clip() -> None:
            gradients = {name: p.grad for name, p in named if p.grad is not None}
            norm.copy_(self.portion.norm(gradients, norm_type))
            clip_grads_with_norm_(parameters, max_norm, norm)

        self._clip = clip
        return norm

    def _clip_now(self) -> None:
        if self._clip is not None:
            self._clip()
            self._clip = None

    def _steps_elsewhere(self) -> bool:
        """Whether what is applied is this worker's own gradient, by a server or to a vector in shared memory."""
        strategy = self.session.strategy
        return strategy.server_ranks() > 0 or "shared-memory" in strategy.needs

    def holds(self, parameters: Iterable[nn.Parameter]) -> bool:
        return {id(p) for p in parameters} <= {id(p) for p in self.replica.parameters}

    # Judging and the end

    def returned(self) -> Tensor:
        """The values that the model would have if the block ended now."""
        worker, strategy = self.session.worker, self.session.strategy
        found = strategy.consensus(worker)
        if found is None:
            part, weight = strategy.part(worker)
            mean_weight = torch.tensor(weight, dtype=torch.float64)
            self.session.group.all_reduce(mean_weight, "mean")
            found = mean_replica(self.replica, self.session.group, part, weight, float(mean_weight))
        if not strategy.lockstep:
            self.portion.make_alike(found, counted=False)
        return found

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, the model is in eval mode; then in whatever modes its modules were."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training

    def uncounted(self) -> AbstractContextManager[None]:
        """Inside, what the parts of a model tell each other is not counted."""
        return self._within.uncounted() if self._within else nullcontext()

    def end(self) -> None:
        """The farewell: the strategy ends, and everyone has one model."""
        self.watch.look(self.model)
        if self.session.strategy.alike:
            self.watch.compare(self.session)
        self.session.end()

    def release(self) -> None:
        """Model and optimizer are ordinary ones again."""
        self.watch.end()
        if self.early is not None:
            self.early.end()
        self.replica.release()
        optimizer: Any = self.optimizer
        for name in ("zero_grad", "_step_supports_amp_scaling"):
            vars(optimizer).pop(name, None)

        def step(*_: Any, **__: Any) -> Any:
            raise UserError("the team has ended; call optimizer.step() inside the 'with hocket.join(...)' block")

        optimizer.step = step


def _tell_scaler(optimizer: torch.optim.Optimizer) -> None:
    """Let the GradScaler that has called a step hear of an overflow elsewhere, so that all workers' scales stay equal.

    PyTorch gives an optimizer what its scaler has found, and no way to answer: the scaler is among our callers.
    """
    frame = sys._getframe()
    while frame.f_back and not isinstance(frame.f_locals.get("self"), torch.amp.GradScaler):
        frame = frame.f_back
    scaler = frame.f_locals.get("self")
    if isinstance(scaler, torch.amp.GradScaler):
        for found in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            found.fill_(1.0)


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, servers: int) -> None:
    """Refuse what could not train this model, or not the way that the user thinks."""
    known = {id(p) for p in model.parameters()}
    if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
        raise UserError(
            "the optimizer has parameters that the model has not; make it from model.parameters(), after the last "
            "change to the model, and then call team.prepare"
        )
    if not isinstance(optimizer, torch.optim.LBFGS):
        return
    if servers:
        raise UserError("LBFGS needs the loss at every step, which a server does not have; use another optimizer")
    group = optimizer.param_groups[0]
    if group["max_iter"] != 1 or group["line_search_fn"] is not None:
        raise UserError("LBFGS evaluates several gradients a step; use LBFGS(..., max_iter=1, line_search_fn=None)")
