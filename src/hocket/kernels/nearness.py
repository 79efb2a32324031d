"""Bringing memory near before it is needed."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def _bringing(write: int) -> Any:
    @intrinsic
    def bring(typing_context: Any, array: Any, index: Any) -> Any:
        """Begin to bring the cache line of `array[index]` near."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            made = context.make_array(signature.args[0])(context, builder, args[0])
            item = cgutils.get_item_pointer(context, builder, signature.args[0], made, [args[1]])
            byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
            builder.call(function, [builder.bitcast(item, byte), word(write), word(3), word(1)])  # to L1, data
            return context.get_dummy_value()

        return types.void(array, index), codegen

    return bring


prefetch = _bringing(0)
"""For reading: other cores keep the line."""
prefetch_to_write = _bringing(1)
"""For reading and writing: the other cores have lost the line by the time it is written, and need not be asked then."""
