"""Multi-layer perceptrons with ReLU and cross-entropy, compiled: gradients by back-propagation in float32.

The parameters lie in one flat vector as torch has them: for each layer the weights [out, in], then the bias. The
gradient of a layer's weights is a product of what came back and what went in, deltas^T inputs, so it can be added to
any vector at once: to the shared one (HOGWILD! without staleness handling that needs more), which saves two passes
through memory, or to zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor, nn

from hocket.kernels.arrays import Floats, Integers
from hocket.kernels.jit import kernel
from hocket.kernels.memory.gather import CompiledVector, Near
from hocket.kernels.memory.tempering import factor
from hocket.kernels.memory.updates import (
    acquire,
    begin_together,
    close_write,
    copy_vector,
    open_write,
    publish,
    release,
    staleness,
)
from hocket.kernels.memory.vector import MappedVector
from hocket.kernels.memory.words import BROKEN, GAP, HANDLING, HOGWILD, METHOD, NO_ROW, WORKERS
from hocket.kernels.models.family import (
    BROKEN_LOCK,
    DIVERGED,
    FASTMATH,
    Kernel,
    KernelWorker,
    Log,
    note,
    portion,
    stop_all,
    take_batch,
)
from hocket.kernels.models.perceptron import is_cross_entropy, widths_of

# Columns of a plan, which has a row for each layer
IN, OUT, WEIGHTS, BIAS, BEFORE, AFTER = range(6)  # BEFORE, AFTER: where a sample's inputs and outputs begin


class DenseData(NamedTuple):
    """A perceptron's shape and its samples."""

    plan: Integers
    inputs: Floats
    targets: Integers


class DenseWork(NamedTuple):
    """One worker's workspace for back-propagation, and its momentum."""

    values: Floats
    """The inputs of each layer and the outputs of the last, for a batch."""
    deltas: Floats
    """The loss's gradient by them."""
    g: Floats
    momentum: float
    velocity: Floats


_float = types.CPointer(types.float32)
# BLAS as Numba's own np.dot reaches it (scipy's), with the factors that np.dot has no arguments for.
_xxgemm = types.ExternalFunction(
    "numba_xxgemm",
    types.intc(
        *(types.char, types.char, types.char, types.intp, types.intp, types.intp, _float),
        *(_float, types.intp, _float, types.intp, _float, _float, types.intp),
    ),
)
_SINGLE, _TRANSPOSED, _PLAIN = ord("s"), ord("t"), ord("n")


@intrinsic
def _pointer_to(typing_context: Any, number: Any) -> Any:
    """To a copy of the number as float32, on the stack."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        single = context.cast(builder, args[0], signature.args[0], types.float32)
        return cgutils.alloca_once_value(builder, single)

    return _float(number), codegen


def plan_of(widths: list[int]) -> Integers:
    """Where each layer's parameters and activations lie."""
    plan = np.zeros((len(widths) - 1, 6), np.int64)
    at = unit = 0
    for layer, (fan_in, fan_out) in enumerate(pairwise(widths)):
        plan[layer] = fan_in, fan_out, at, at + fan_in * fan_out, unit, unit + fan_in
        at += fan_in * fan_out + fan_out
        unit += fan_in
    return plan


@kernel
def multiply(
    flip_a: bool, flip_b: bool, m: int, n: int, k: int, alpha: float, a: Floats, b: Floats, beta: float, c: Floats
) -> None:
    """c = alpha a b + beta c for flat row-major a[m, k], b[k, n] and c[m, n]; a and b are transposed where flipped."""
    # BLAS wants columns first: it is given the transposed problem, c^T = b^T a^T.
    _xxgemm(
        _SINGLE,
        _TRANSPOSED if flip_b else _PLAIN,
        _TRANSPOSED if flip_a else _PLAIN,
        n,
        m,
        k,
        _pointer_to(alpha),
        b.ctypes,
        k if flip_b else n,
        a.ctypes,
        m if flip_a else k,
        _pointer_to(beta),
        c.ctypes,
        n,
    )


@kernel(fastmath=FASTMATH)
def weigh_one(weights: Floats, inputs: Floats, outputs: Floats) -> None:
    """outputs = weights inputs, for one sample."""
    fan_in = inputs.size
    for o in range(outputs.size):
        row = weights[o * fan_in : (o + 1) * fan_in]
        total = np.float32(0)
        for i in range(fan_in):
            total += row[i] * inputs[i]
        outputs[o] = total


@kernel(fastmath=FASTMATH)
def weigh_back_one(weights: Floats, deltas: Floats, before: Floats) -> None:
    """before = weights^T deltas, for one sample."""
    fan_in = before.size
    before[:] = 0
    for o in range(deltas.size):
        delta = deltas[o]
        if delta != 0:
            row = weights[o * fan_in : (o + 1) * fan_in]
            for i in range(fan_in):
                before[i] += row[i] * delta


@kernel(fastmath=FASTMATH)
def add_one(inputs: Floats, deltas: Floats, alpha: float, weights: Floats) -> None:
    """weights += alpha deltas inputs^T, for one sample; rows of units that were off stay untouched."""
    fan_in = inputs.size
    for o in range(deltas.size):
        step = np.float32(alpha) * deltas[o]
        if step != 0:
            row = weights[o * fan_in : (o + 1) * fan_in]
            for i in range(fan_in):
                row[i] += step * inputs[i]


@kernel(fastmath=FASTMATH)
def add_bias(values: Floats, bias: Floats, n: int, rectify: bool) -> None:
    """values += bias for n samples, then ReLU if wanted."""
    width = bias.size
    for s in range(n):
        row = values[s * width : (s + 1) * width]
        for o in range(width):
            value = row[o] + bias[o]
            row[o] = max(value, np.float32(0)) if rectify else value


@kernel
def cross_entropy(logits: Floats, targets: Integers, chosen: Integers, deltas: Floats) -> float:
    """The mean loss of the chosen samples; `deltas` becomes its gradient by the logits."""
    n = chosen.size
    width = logits.size // n
    share = np.float32(1 / n)
    loss = 0.0
    for s in range(n):
        row, out = logits[s * width : (s + 1) * width], deltas[s * width : (s + 1) * width]
        top = row[0]
        for c in range(1, width):
            top = max(top, row[c])
        total = np.float32(0)
        for c in range(width):
            out[c] = np.exp(row[c] - top)
            total += out[c]
        target = targets[chosen[s]]
        loss += np.log(total) - (row[target] - top)
        scale = share / total
        for c in range(width):
            out[c] *= scale
        out[target] -= share
    return loss / n


@kernel
def back_propagate(
    data: DenseData, x: Floats, later: Floats, chosen: Integers, values: Floats, deltas: Floats
) -> float:
    """The mean loss of the chosen samples at the parameters x, of which those of all layers but the first are `later`.

    `values` becomes the inputs of each layer and the outputs of the last, `deltas` the loss's gradient by them.
    """
    plan, inputs, targets = data
    n, layers = chosen.size, len(plan)
    width = plan[0, IN]
    for s in range(n):
        for i in range(width):  # a slice assignment would take two seconds longer to compile
            values[s * width + i] = inputs[chosen[s], i]
    for layer in range(layers):
        fan_in, fan_out = plan[layer, IN], plan[layer, OUT]
        at = x if layer == 0 else later
        weights = at[plan[layer, WEIGHTS] : plan[layer, BIAS]]
        before, after = values[n * plan[layer, BEFORE] :][: n * fan_in], values[n * plan[layer, AFTER] :][: n * fan_out]
        if n == 1:
            weigh_one(weights, before, after)
        else:
            multiply(False, True, n, fan_out, fan_in, 1.0, before, weights, 0.0, after)
        add_bias(after, at[plan[layer, BIAS] :][:fan_out], n, layer + 1 < layers)
    last, classes = plan[layers - 1, AFTER], plan[layers - 1, OUT]
    loss = cross_entropy(values[n * last :][: n * classes], targets, chosen, deltas[n * last :][: n * classes])
    for layer in range(layers - 1, 0, -1):
        fan_in, fan_out = plan[layer, IN], plan[layer, OUT]
        weights = later[plan[layer, WEIGHTS] : plan[layer, BIAS]]
        before, after = deltas[n * plan[layer, BEFORE] :][: n * fan_in], deltas[n * plan[layer, AFTER] :][: n * fan_out]
        if n == 1:
            weigh_back_one(weights, after, before)
        else:
            multiply(False, False, n, fan_in, fan_out, 1.0, after, weights, 0.0, before)
        outputs = values[n * plan[layer, BEFORE] :][: n * fan_in]
        for i in range(before.size):
            before[i] = before[i] if outputs[i] > 0 else np.float32(0)
    return loss


@kernel
def put_gradient(plan: Integers, n: int, values: Floats, deltas: Floats, alpha: float, add: bool, to: Floats) -> None:
    """to = alpha times the gradient that `back_propagate` found for n samples, or to += that."""
    for layer in range(len(plan)):
        fan_in, fan_out = plan[layer, IN], plan[layer, OUT]
        before, after = values[n * plan[layer, BEFORE] :][: n * fan_in], deltas[n * plan[layer, AFTER] :][: n * fan_out]
        weights, bias = to[plan[layer, WEIGHTS] : plan[layer, BIAS]], to[plan[layer, BIAS] :][:fan_out]
        if n > 1:
            multiply(True, False, fan_out, fan_in, n, alpha, after, before, 1.0 if add else 0.0, weights)
        else:
            if not add:
                weights[:] = 0
            add_one(before, after, alpha, weights)
        if not add:
            bias[:] = 0
        for s in range(n):
            for o in range(fan_out):
                bias[o] += np.float32(alpha) * after[s * fan_out + o]


@kernel
def dense_loop(
    shared: CompiledVector,
    near: Near,
    data: DenseData,
    work: DenseWork,
    order: Integers,
    batch: int,
    lr: float,
    log: Log,
) -> tuple[int, int]:
    """A worker's part of an epoch: batches taken, and how it ended."""
    plan = data.plan
    dim = plan[-1, BIAS] + plan[-1, OUT]
    control, rows, worker = near.vector
    values, deltas, g, momentum, velocity = work
    hogwild = control[METHOD] == HOGWILD and control[HANDLING] < GAP
    others_write = hogwild and control[WORKERS] > 1
    direct = hogwild and momentum == 0
    made = 0
    begin_together(shared.control)
    while True:
        begin = take_batch(shared, near, dim, made, batch, order.size, lr)
        if begin < 0:
            return made, ~begin
        chosen = order[begin : min(begin + batch, order.size)]
        n = chosen.size
        read = acquire(control, rows, worker, dim)
        if read == NO_ROW:
            return made, BROKEN_LOCK
        x = later = rows[read]
        if others_write:  # but what is read twice, to go forward and back, must not change in between
            later = g
            first = plan[0, BIAS] + plan[0, OUT]
            copy_vector(x[first:], later[first:], dim - first)
        loss = back_propagate(data, x, later, chosen, values, deltas)
        if not np.isfinite(loss):
            release(control, worker, read)
            stop_all(shared.control)
            note(log, made, loss, n)
            return made + 1, DIVERGED
        if direct:
            row = open_write(control, rows, worker, dim)
            share = portion(shared, n, batch) * factor(control, worker, staleness(control, worker))
            put_gradient(plan, n, values, deltas, -lr * share, True, rows[row])
            close_write(control, worker, row)
        else:
            put_gradient(plan, n, values, deltas, portion(shared, n, batch), False, g)
            if momentum != 0:
                for i in range(dim):
                    velocity[i] = np.float32(momentum) * velocity[i] + g[i]
            step = g if momentum == 0 else velocity
            if publish(control, rows, worker, read, step, lr, dim) == BROKEN:
                return made, BROKEN_LOCK
        note(log, made, loss, n)
        made += 1


class DenseWorker(KernelWorker):
    """One worker of a perceptron."""

    loop: ClassVar[Any] = staticmethod(dense_loop)

    def __init__(self, kernel: DenseKernel, batch: int, momentum: float) -> None:
        units = batch * int(kernel.data.plan[-1, AFTER] + kernel.data.plan[-1, OUT])
        values, deltas, g = (np.zeros(size, np.float32) for size in (units, units, kernel.dim))
        self._velocity = np.zeros(kernel.dim if momentum else 0, np.float32)
        super().__init__(kernel, batch, DenseWork(values, deltas, g, float(momentum), self._velocity))

    def kept(self) -> dict[str, Tensor]:
        return {"velocity": torch.from_numpy(self._velocity)}

    def run_epoch(self, shared: MappedVector, order: Integers, lr: float) -> int:
        # Numbers below 1e-38 take a hundred times as long as others; small probabilities become such.
        torch.set_flush_denormal(True)
        try:
            return super().run_epoch(shared, order, lr)
        finally:
            torch.set_flush_denormal(False)


class DenseKernel(Kernel):
    """A multi-layer perceptron and its training data."""

    touches_all = True
    data: DenseData

    def __init__(self, widths: list[int], inputs: Tensor, targets: Tensor) -> None:
        plan = plan_of(widths)
        self.data = DenseData(plan, inputs.reshape(len(inputs), -1).contiguous().numpy(), targets.contiguous().numpy())
        self.dim = int(plan[-1, BIAS] + plan[-1, OUT])
        self.samples = len(targets)

    @classmethod
    def recognise(cls, model: nn.Module, loss: Callable[..., Tensor], samples: Any) -> DenseKernel | None:
        """The kernel for a model that is one, trained with cross-entropy on tensors in memory."""
        widths = widths_of(model)
        if widths is None or not is_cross_entropy(loss) or not isinstance(samples, tuple):
            return None
        inputs, targets = samples
        fits = inputs.device.type == "cpu" and inputs.dtype == torch.float32 and inputs[0].numel() == widths[0]
        fits = fits and targets.dtype == torch.int64 and targets.dim() == 1
        if not fits or int(targets.min()) < 0 or int(targets.max()) >= widths[-1]:
            return None
        return cls(widths, inputs, targets)

    def worker(self, index: int, batch: int, momentum: float = 0.0) -> DenseWorker:
        return DenseWorker(self, batch, momentum)

    def running(self) -> AbstractContextManager[Any]:
        """One BLAS thread a worker, or the speed-up over one worker is fake."""
        import scipy.linalg  # type: ignore[import-untyped]  # noqa: F401 - its BLAS must be there to be limited
        import threadpoolctl  # type: ignore[import-untyped]

        limits: AbstractContextManager[Any] = threadpoolctl.threadpool_limits(1, user_api="blas")
        return limits
