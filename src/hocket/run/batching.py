"""Whether the gradients of many workers can be computed in one call: tried out before anything starts."""

from __future__ import annotations

import copy
import dataclasses
import random
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hocket.core.errors import UserError, said, shown
from hocket.core.replica import Replica
from hocket.core.seeds import seeded
from hocket.drivers.all_at_once import refuse
from hocket.drivers.batched import Rows
from hocket.drivers.gradients import WholeModel
from hocket.drivers.plan import Plan
from hocket.engines.catalogue import Engine
from hocket.tasks import SampleSet, Task

FEWEST = 8
"""Workers for which it is worth it: a batched call costs as much as three gradients before it does anything."""
WORTH = 2**18
"""Parameters times samples of a batch, up to which it can be faster on the CPU: beyond, arithmetic takes the time."""
TIMED, ROUNDS = 32, 5
"""Replicas that it is timed with on the CPU, and how often."""
TRIED = 2
"""Replicas that it is tried out with."""


def batching(engine: Engine, plan: Plan, task: Task, train: SampleSet) -> tuple[Plan, str]:
    """The plan, batched where the engine was asked to and the model allows it, and a line for the user why not."""
    wanted = engine.batches()
    if engine.drives_all:
        refuse(plan, task, len(train))
        if why_not := _why_not(plan, _with_own_loss(task), train):
            raise UserError(f"engine {engine.name} computes all gradients at once: {why_not}; use --engine sim")
    if wanted == "off" or (wanted == "auto" and plan.workers < FEWEST):
        return plan, ""
    with _no_loops(wanted == "auto"):
        tried = _with_own_loss(task)
        why_not = (_too_large(plan, task) if wanted == "auto" else "") or _why_not(plan, tried, train)
        if not why_not and wanted == "auto" and plan.device == "cpu":
            why_not = _no_gain(plan, tried, train)
    if why_not and wanted == "on":
        raise UserError(f"batched=on: {why_not}; use batched=off")
    if why_not:
        return plan, f"gradients are computed one by one: {why_not}"
    return dataclasses.replace(plan, batched=True), ""


def _with_own_loss(task: Task) -> Task:
    """The task with a loss for trials alone: what it keeps of them must not come into the run."""
    try:
        return dataclasses.replace(task, loss=copy.deepcopy(task.loss))
    except Exception:  # whatever the user's loss is made of
        return task


def _too_large(plan: Plan, task: Task) -> str:
    """Why it cannot be faster on the CPU: what costs there is the arithmetic, not the calls. Empty if it can."""
    parameters = sum(p.numel() for p in task.build_model(plan.seed).parameters())
    if plan.device == "cpu" and parameters * plan.batch > WORTH:
        return "a model of this size is no faster in batches on the CPU"
    return ""


def _no_gain(plan: Plan, task: Task, train: SampleSet) -> str:
    """Why it is not faster on the CPU, by the clock. Empty if it is."""
    with seeded(plan.seed), _one_thread():
        count = min(plan.workers, TIMED)
        rows = Rows(task, train, count)
        single = WholeModel(task, rows.replica(0, task.build_model(plan.seed), torch.device("cpu")), train)
        rows.stack()
        index = torch.arange(count * plan.batch) % len(train)

        def all_at_once() -> None:
            rows.gradients(range(count), index)

        def one_by_one() -> None:
            for part in torch.split(index, plan.batch):
                single.compute(part)

        took_s = [(_seconds(all_at_once), _seconds(one_by_one)) for _ in range(1 + ROUNDS)][1:]  # the first warms up
    # Any gain will do: 8 workers of a small model take 0.6 of the time, and up to 0.9 on a machine with much to do.
    # With a threshold among these, two runs with one seed would decide now this way, now the other.
    if min(together for together, _ in took_s) < min(alone for _, alone in took_s):
        return ""
    return "this model is no faster in batches on the CPU"


def _seconds(call: Callable[[], None]) -> float:
    began_s = time.thread_time()  # what others do on this machine must not decide
    call()
    return time.thread_time() - began_s


@contextmanager
def _one_thread() -> Iterator[None]:
    """As the ranks will have it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _no_loops(wanted: bool) -> Iterator[None]:
    """Inside, what PyTorch would do for one replica after the other is refused: that would gain nothing."""
    functorch: Any = torch._C._functorch
    before = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(before and not wanted)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(before)


def _why_not(plan: Plan, task: Task, train: SampleSet) -> str:
    """Empty if gradients can be batched."""
    if why_not := _other_ways(plan):
        return why_not
    if task.on_step or task.on_epoch:
        return "Task.on_step and on_epoch may change the model of a worker, and one model computes for all"
    with seeded(plan.seed):
        models = [task.build_model(plan.seed) for _ in range(TRIED)]
        if why_not := _obstacle(models[0]):
            return why_not
        rows = Rows(task, train, TRIED)
        replicas = [rows.replica(row, model.train(), torch.device("cpu")) for row, model in enumerate(models)]
        batch = min(plan.batch, len(train) // TRIED) or 1
        indices = [torch.arange(len(train))[row * batch :][:batch] for row in range(TRIED)]
        inputs, targets = train.take(indices[0])
        if not all(isinstance(t, Tensor) and t.layout == torch.strided for t in (inputs, targets)):
            return "its samples are no plain tensors"
        others, own = _other_generators(), torch.get_rng_state()
        try:
            rows.gradients(range(TRIED), torch.cat(indices))
            kept = _kept(models[0], task.loss)  # what it only puts by when it is called first does no harm
            with rows.rehearsing():  # so that a single gradient finds the statistics that this one finds
                rows.gradients(range(TRIED), torch.cat(indices))
        except Exception as error:  # whatever the user's model and loss do when they meet a stack of replicas
            return _in_words(error)
        if _other_generators() != others:
            return "the model draws from Python's or NumPy's generator, and all workers would draw alike"
        if _kept(models[0], task.loss) != kept:
            return "the model, or its loss, keeps something from call to call, and all workers would share it"
        if not torch.equal(torch.get_rng_state(), own):
            return ""  # with dropout no two gradients agree
        return _difference(task, train, replicas, indices)


def _other_ways(plan: Plan) -> str:
    """What the plan has gradients computed by, if not by the whole model on a whole batch at once."""
    ways = {
        "layout": plan.layout,
        "accumulate": plan.accumulate > 1,
        "autocast": plan.autocasts,
        "loaders": plan.loaders,
        "a strategy that sends while gradients are computed": plan.made_strategy.sends_early,
    }
    found = " and ".join(name for name, is_given in ways.items() if is_given)
    return f"that does not go with {found}" if found else ""


def _other_generators() -> tuple[object, ...]:
    """Where Python's and NumPy's are: they know nothing of batches."""
    numpys: dict[str, Any] = np.random.get_state(legacy=False)["state"]
    return random.getstate(), numpys["pos"], numpys["key"].tobytes()


def _kept(model: nn.Module, loss: Callable[..., Tensor]) -> list[object]:
    """What they may have changed when they are called again, and that is no row of its own for every worker."""
    modules = [*model.modules(), *(loss.modules() if isinstance(loss, nn.Module) else ())]
    kept: list[object] = []
    for holder in modules if loss in modules else [*modules, loss]:
        for value in getattr(holder, "__dict__", {}).values():
            if isinstance(value, bool | int | float | str):
                kept.append(value)
            elif isinstance(value, list | dict | set | deque):
                kept.append(len(value))
            elif isinstance(value, Tensor):
                kept.append(id(value))
    for module in modules:
        kept += [(id(buffer), buffer._version) for buffer in module._buffers.values() if buffer is not None]
    return kept


def _difference(task: Task, train: SampleSet, replicas: list[Replica], indices: list[Tensor]) -> str:
    for replica, index in zip(replicas, indices, strict=True):
        batched = replica.g.clone()
        WholeModel(task, replica, train).compute(index)
        if not torch.allclose(batched, replica.g, rtol=1e-3, atol=1e-5 * float(replica.g.abs().max())):
            return "batched gradients of this model differ from those computed one by one"
    return ""


def _obstacle(model: nn.Module) -> str:
    """What is known to stand in the way."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            return f"{type(module).__name__} changes its statistics in place"
    if len({p.dtype for p in model.parameters()}) > 1:
        return "its parameters have several types"
    return ""


def _in_words(error: Exception) -> str:
    text = said(error)
    if isinstance(error, UserError):
        return text
    if "data-dependent control flow" in text or ".item()" in text:
        return "the model's way depends on its data (an if on a tensor, or .item())"
    if "autograd.Function" in text:
        return "an autograd.Function in it has no batched form (generate_vmap_rule, or a vmap of its own)"
    if "in-place" in text or "inplace" in text:
        return "the model changes a tensor of its own in place"
    if found := re.match(r"(?:Batching rule not implemented for |vmap: we do not yet support )?aten::(\w+)", text):
        return f"PyTorch has no batched form of {found[1].strip('_')}"
    return f"the model cannot be batched ({shown(text.strip().partition(chr(10))[0])})"
