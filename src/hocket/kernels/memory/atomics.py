"""Atomic operations on one element of an int64 array, and the little of libc that waiting needs.

`load`, `fetch_add` and `compare_and_swap` are sequentially consistent, `store` is release. The slot protocol of
`leashed` writes one word and then looks at another, and so does the worker that it races with: with acquire and
release alone both may see the old value (Dekker's pattern). On x86 the stronger order costs nothing here: a load is a
plain move, and a read-modify-write is a full barrier anyway.
"""

from __future__ import annotations

import platform
import time
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

ORDER = "seq_cst"
_WORD = ir.IntType(64)
_ON_X86 = platform.machine() in ("x86_64", "AMD64")

sched_yield = types.ExternalFunction("sched_yield", types.int32())
usleep = types.ExternalFunction("usleep", types.int32(types.uint32))


def _pointer(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Of `words[index]`, the first two arguments."""
    array_type = signature.args[0]
    assert array_type.dtype == types.int64 and array_type.ndim == 1
    array = context.make_array(array_type)(context, builder, args[0])
    return cgutils.get_item_pointer(context, builder, array_type, array, [args[1]])


@intrinsic
def load(typing_context: Any, words: Any, index: Any) -> Any:
    """`words[index]`, sequentially consistent (so also acquire)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(context, builder, signature, args), ORDER, 8)

    return types.int64(words, types.intp), codegen


@intrinsic
def store(typing_context: Any, words: Any, index: Any, value: Any) -> Any:
    """`words[index] = value`, release: whoever loads the value also sees what was written before it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[2], _pointer(context, builder, signature, args), "release", 8)
        return context.get_dummy_value()

    return types.void(words, types.intp, types.int64), codegen


@intrinsic
def fetch_add(typing_context: Any, words: Any, index: Any, value: Any) -> Any:
    """`words[index] += value`; returns what was there before. Sequentially consistent."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(context, builder, signature, args), args[2], ORDER)

    return types.int64(words, types.intp, types.int64), codegen


@intrinsic
def compare_and_swap(typing_context: Any, words: Any, index: Any, expected: Any, value: Any) -> Any:
    """If `words[index]` is `expected`, make it `value`; returns whether it did. Sequentially consistent."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature, args)
        return builder.extract_value(builder.cmpxchg(pointer, args[2], args[3], ORDER, ORDER), 1)

    return types.boolean(words, types.intp, types.int64, types.int64), codegen


@intrinsic
def address(typing_context: Any, words: Any, index: Any) -> Any:
    """Where `words[index]` lies in memory, for a call into libc."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(_pointer(context, builder, signature, args), _WORD)

    return types.intp(words, types.intp), codegen


@intrinsic
def pause(typing_context: Any) -> Any:
    """Tell the core that this is a spinning wait, where it knows such a hint."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _ON_X86:
            hint = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, hint, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), codegen


def _clock_ns(builder: Any, clock: int) -> Any:
    timespec = cgutils.alloca_once(builder, ir.ArrayType(_WORD, 2))
    arguments = [ir.IntType(32), timespec.type]
    clock_gettime = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.IntType(32), arguments), "clock_gettime"
    )
    builder.call(clock_gettime, [ir.Constant(ir.IntType(32), clock), timespec])
    seconds, nanoseconds = (builder.load(cgutils.gep_inbounds(builder, timespec, 0, i)) for i in (0, 1))
    return builder.add(builder.mul(seconds, ir.Constant(_WORD, 10**9)), nanoseconds)


@intrinsic
def monotonic_ns(typing_context: Any) -> Any:
    """`time.monotonic_ns()`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _clock_ns(builder, time.CLOCK_MONOTONIC)

    return types.int64(), codegen


@intrinsic
def wall_ns(typing_context: Any) -> Any:
    """`time.time_ns()`: the clock that pthread's deadlines are on."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _clock_ns(builder, time.CLOCK_REALTIME)

    return types.int64(), codegen
