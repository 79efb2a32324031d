"""The operating system's locks, taken without the GIL and never waited for without a deadline.

They lie in the shared block and are process-shared. The mutex is robust: a worker that dies with it hands it to the
next one. A rwlock cannot be robust, so a worker that dies with it makes the others run into their deadline.
"""

from __future__ import annotations

import ctypes
import errno

from numba import types

from hocket.kernels.arrays import Words
from hocket.kernels.jit import kernel
from hocket.kernels.memory.atomics import address, fetch_add, monotonic_ns, pause, sched_yield, store, usleep, wall_ns
from hocket.kernels.memory.words import (
    BACKOFF,
    BACKOFF_CONSTANT,
    BACKOFF_EXPONENTIAL,
    BACKOFF_MAX_NS,
    BACKOFF_NONE,
    BACKOFF_NS,
    BACKOFF_YIELD,
    BREAKS,
    DEADLINE_NS,
    LOCK,
    METHOD,
    MUTEX,
    RANDOM,
    RECOVERED,
    RWLOCK,
    STOP,
    TIMESPEC,
    WAIT_NS,
    WORKER_AREA,
    WORKER_WORDS,
)

READING, WRITING = range(2)  # why a lock is taken; readers share a rwlock
_EBUSY, _ETIMEDOUT, _EOWNERDEAD = errno.EBUSY, errno.ETIMEDOUT, errno.EOWNERDEAD
_NAP_NS = 20_000_000  # the longest sleep before a look whether the lock is free, see _nap
_SLEEP_NS = 100_000  # longer waits leave the core to others

_call = types.int32(types.intp)
_timed_call = types.int32(types.intp, types.intp)
_mutex_trylock = types.ExternalFunction("pthread_mutex_trylock", _call)
_mutex_timedlock = types.ExternalFunction("pthread_mutex_timedlock", _timed_call)
_mutex_consistent = types.ExternalFunction("pthread_mutex_consistent", _call)
_mutex_unlock = types.ExternalFunction("pthread_mutex_unlock", _call)
_rwlock_tryrdlock = types.ExternalFunction("pthread_rwlock_tryrdlock", _call)
_rwlock_trywrlock = types.ExternalFunction("pthread_rwlock_trywrlock", _call)
_rwlock_timedrdlock = types.ExternalFunction("pthread_rwlock_timedrdlock", _timed_call)
_rwlock_timedwrlock = types.ExternalFunction("pthread_rwlock_timedwrlock", _timed_call)
_rwlock_unlock = types.ExternalFunction("pthread_rwlock_unlock", _call)


def create(control: Words) -> None:
    """Make the lock that the method in `control` asks for."""
    libc = ctypes.CDLL(None)
    lock = ctypes.c_void_p(control[LOCK:].ctypes.data)
    attributes = ctypes.create_string_buffer(64)
    process_shared, robust, prefer_writers = 1, 1, 2  # glibc's values
    if control[METHOD] == MUTEX:
        libc.pthread_mutexattr_init(attributes)
        libc.pthread_mutexattr_setpshared(attributes, process_shared)
        libc.pthread_mutexattr_setrobust(attributes, robust)
        failed = libc.pthread_mutex_init(lock, attributes)
    elif control[METHOD] == RWLOCK:
        libc.pthread_rwlockattr_init(attributes)
        libc.pthread_rwlockattr_setpshared(attributes, process_shared)
        libc.pthread_rwlockattr_setkind_np(attributes, prefer_writers)  # or readers could starve them
        failed = libc.pthread_rwlock_init(lock, attributes)
    else:
        return
    assert failed == 0, f"pthread says {errno.errorcode.get(failed, failed)}"


@kernel
def take(control: Words, w: int, purpose: int) -> bool:
    """Take the lock for worker w; False, and the run is asked to stop, if that fails before the deadline."""
    code = _attempt(control, purpose)
    if code == _EBUSY:
        code = _wait(control, w, purpose)
    if code == _EOWNERDEAD:
        _mutex_consistent(address(control, LOCK))
        fetch_add(control, RECOVERED, 1)
        code = 0
    if code != 0:
        give_up(control, w)
    return code == 0


@kernel
def drop(control: Words) -> None:
    """Give the lock back."""
    if control[METHOD] == MUTEX:
        _mutex_unlock(address(control, LOCK))
    else:
        _rwlock_unlock(address(control, LOCK))


@kernel
def give_up(control: Words, w: int) -> None:
    """Note that worker w waited in vain, and ask all workers to end."""
    control[WORKER_AREA + w * WORKER_WORDS + BREAKS] += 1
    store(control, STOP, 1)


@kernel
def back_off(control: Words, w: int, failed: int) -> None:
    """Wait after the `failed`-th failed attempt in a row, as the options say."""
    kind = control[BACKOFF]
    if kind == BACKOFF_YIELD:
        sched_yield()
    elif kind == BACKOFF_CONSTANT:
        _rest(control[BACKOFF_NS])
    elif kind == BACKOFF_EXPONENTIAL:
        longest = min(control[BACKOFF_NS] << min(failed - 1, 20), control[BACKOFF_MAX_NS])
        state = WORKER_AREA + w * WORKER_WORDS + RANDOM
        control[state] = (control[state] * 1103515245 + 12345) & 0x7FFFFFFF
        _rest(longest // 2 + (longest // 2 * control[state] >> 31))  # jitter, or equals would collide again


@kernel
def _attempt(control: Words, purpose: int) -> int:
    lock = address(control, LOCK)
    if control[METHOD] == MUTEX:
        return _mutex_trylock(lock)
    if purpose == WRITING:
        return _rwlock_trywrlock(lock)
    return _rwlock_tryrdlock(lock)


@kernel
def _wait(control: Words, w: int, purpose: int) -> int:
    """Wait for a lock that was not free at once, and count the time."""
    start = monotonic_ns()
    code = _EBUSY
    failed = 0
    while code in (_EBUSY, _ETIMEDOUT) and monotonic_ns() - start < control[DEADLINE_NS]:
        if control[BACKOFF] == BACKOFF_NONE:
            code = _nap(control, w, purpose)
        else:
            failed += 1
            back_off(control, w, failed)
            code = _attempt(control, purpose)
    control[WORKER_AREA + w * WORKER_WORDS + WAIT_NS] += monotonic_ns() - start
    return code


@kernel
def _nap(control: Words, w: int, purpose: int) -> int:
    """Sleep until the lock is ours, but not for long: the wake-up is lost if the one that it was meant for dies.

    A worker that is killed between its wake-up and its hold on the lock, while a third one takes it, leaves a lock
    that says of itself that nobody waits.
    """
    until = wall_ns() + min(_NAP_NS, control[DEADLINE_NS])
    timespec = WORKER_AREA + w * WORKER_WORDS + TIMESPEC
    control[timespec] = until // 1_000_000_000
    control[timespec + 1] = until % 1_000_000_000
    lock = address(control, LOCK)
    if control[METHOD] == MUTEX:
        return _mutex_timedlock(lock, address(control, timespec))
    if purpose == WRITING:
        return _rwlock_timedwrlock(lock, address(control, timespec))
    return _rwlock_timedrdlock(lock, address(control, timespec))


@kernel
def _rest(ns: int) -> None:
    if ns >= _SLEEP_NS:
        usleep(ns // 1000)
        return
    until = monotonic_ns() + ns
    while monotonic_ns() < until:
        pause()
