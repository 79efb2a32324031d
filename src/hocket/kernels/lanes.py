"""Several floats that are computed with at once: a vector register as a value in a kernel.

The compiler's own vectorisation asks, before each loop, whether any of its arrays overlap; where the rows of a matrix
are short and many, that takes longer than the loop.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16
"""Floats of a register of 512 bits; elsewhere the compiler takes several."""

_FLOAT, _WORD = ir.FloatType(), ir.IntType(32)
_VECTOR, _MASK = ir.VectorType(_FLOAT, LANES), ir.VectorType(ir.IntType(1), LANES)


class Lanes(types.Type):  # type: ignore[misc]
    """LANES floats."""

    def __init__(self) -> None:
        super().__init__("Lanes")


lanes = Lanes()


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR)


def _pointer(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    """To the lanes from element `at` of a contiguous array on."""
    made = context.make_array(kind)(context, builder, array)
    return builder.bitcast(builder.gep(made.data, [at]), _VECTOR.as_pointer())


def _call(builder: Any, result: Any, name: str, *args: Any, **flags: Any) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args, **flags)


def _first(builder: Any, count: Any) -> Any:
    """A mask of the first `count` lanes."""
    words = ir.VectorType(_WORD, LANES)
    limit = _spread(builder, builder.trunc(count, _WORD), words)
    return builder.icmp_unsigned("<", ir.Constant(words, list(range(LANES))), limit)


def _spread(builder: Any, value: Any, kind: Any) -> Any:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _WORD(0))
    zeros = ir.Constant(ir.VectorType(_WORD, LANES), None)
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), zeros)


@intrinsic
def load_first(typing_context: Any, array: Any, at: Any, count: Any) -> Any:
    """The first `count` lanes from array[at] on; the others are 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        mask, zero = _first(builder, args[2]), ir.Constant(_VECTOR, None)
        return _call(builder, _VECTOR, "llvm.masked.load.v16f32.p0v16f32", pointer, _WORD(4), mask, zero)

    return lanes(array, types.intp, types.intp), codegen


@intrinsic
def store_first(typing_context: Any, array: Any, at: Any, count: Any, value: Any) -> Any:
    """Write the first `count` lanes alone."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        name, mask = "llvm.masked.store.v16f32.p0v16f32", _first(builder, args[2])
        _call(builder, ir.VoidType(), name, args[3], pointer, _WORD(4), mask)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, lanes), codegen


@intrinsic
def spread(typing_context: Any, value: Any) -> Any:
    """A number in all lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _spread(builder, args[0], _VECTOR)

    return lanes(types.float32), codegen


@intrinsic
def multiply_add(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, _VECTOR, "llvm.fmuladd.v16f32", *args)

    return lanes(lanes, lanes, lanes), codegen


@intrinsic
def add(typing_context: Any, a: Any, b: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fadd(*args)

    return lanes(lanes, lanes), codegen


@intrinsic
def total(typing_context: Any, value: Any) -> Any:
    """The sum of all lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zero = ir.Constant(_FLOAT, 0.0)
        return _call(builder, _FLOAT, "llvm.vector.reduce.fadd.v16f32", zero, args[0], fastmath=("reassoc", "nsz"))

    return types.float32(lanes), codegen
