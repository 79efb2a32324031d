"""Sleep in the kernel until another process writes into a pipe.

In place of a futex where somebody is asked for something and will be waited for: to write into a pipe tells the system
that the writer is about to sleep, so that it puts who wakes up on the writer's core, if no other is idle. Woken by a
futex it would queue for the core that it had last, behind somebody who computes, while the core of who waits for it
has nothing to do.
"""

from __future__ import annotations

import errno

import numpy as np
from numba import types
from numpy.typing import NDArray

from hocket.kernels.jit import kernel
from hocket.kernels.memory.atomics import address
from hocket.kernels.memory.futex import last_error

Words = NDArray[np.int64]

SCRATCH_WORDS = 4
_POLLIN = 1 << 32  # in a pollfd, behind the descriptor
_EINTR = errno.EINTR
_ONE_BYTE, _MANY = 1, 8

_ppoll = types.ExternalFunction("ppoll", types.int32(types.intp, types.uint64, types.intp, types.intp))
_read = types.ExternalFunction("read", types.intp(types.int32, types.intp, types.uintp))
_write = types.ExternalFunction("write", types.intp(types.int32, types.intp, types.uintp))


@kernel
def sleep_until_rung(descriptor: int, ns: int, words: Words, scratch: int) -> bool:
    """Sleep for `ns` at most, unless there is something in the pipe, which is taken out.

    `scratch` is the first of SCRATCH_WORDS. True if a signal came that the caller has to see to.
    """
    words[scratch] = descriptor | _POLLIN
    words[scratch + 1] = ns // 1_000_000_000
    words[scratch + 2] = ns % 1_000_000_000
    found = _ppoll(address(words, scratch), 1, address(words, scratch + 1), 0)
    if found > 0:
        _read(descriptor, address(words, scratch + 3), _MANY)
    return found < 0 and last_error() == _EINTR


@kernel
def ring(descriptor: int, words: Words, scratch: int) -> None:
    """Wake who sleeps at the pipe's other end."""
    _write(descriptor, address(words, scratch), _ONE_BYTE)
