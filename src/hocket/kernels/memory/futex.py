"""Sleep in the kernel until another process changes a word of shared memory (Linux's futex)."""

from __future__ import annotations

import errno
import platform
import sys
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from hocket.kernels.jit import kernel
from hocket.kernels.memory.atomics import address

Words = NDArray[np.int64]

_CALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0) if sys.platform == "linux" else 0
available = _CALL != 0 and sys.byteorder == "little"
"""Whether this machine has it, as it is called here: a futex is the lower half of a word."""
_WAIT, _WAKE = 0, 1  # between processes, not only between threads
_EVERYBODY = 0x7FFFFFFF
_EINTR = errno.EINTR
_LOWER_HALF = 0xFFFFFFFF

_syscall = types.ExternalFunction(
    "syscall", types.int64(types.int64, types.intp, types.int64, types.int64, types.intp, types.intp, types.int64)
)


@intrinsic
def last_error(typing_context: Any) -> Any:
    """The reason why the last call into libc failed."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = ir.IntType(32)
        where = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(number.as_pointer(), []), "__errno_location"
        )
        return builder.sext(builder.load(builder.call(where, [])), ir.IntType(64))

    return types.int64(), codegen


@kernel
def sleep_while(words: Words, at: int, value: int, ns: int, timespec: int) -> bool:
    """Sleep for `ns` at most, unless `words[at]` is no longer `value` or somebody calls `wake`.

    `timespec` is the first of two words of scratch. True if a signal came that the caller has to see to.
    """
    words[timespec] = ns // 1_000_000_000
    words[timespec + 1] = ns % 1_000_000_000
    failed = _syscall(_CALL, address(words, at), _WAIT, value & _LOWER_HALF, address(words, timespec), 0, 0)
    return failed < 0 and last_error() == _EINTR


@kernel
def wake(words: Words, at: int) -> None:
    """Wake all who sleep at this word."""
    _syscall(_CALL, address(words, at), _WAKE, _EVERYBODY, 0, 0, 0)
