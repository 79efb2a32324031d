"""Samples of a user's files, decoded once a host: who needs them first decodes them, and lends them to the others.

They lie in memory that has no name and is gone with the last process that has mapped it; nothing is put by. Processes
find each other by an address that is no file's either (Linux' abstract sockets). So it does not matter who started
whom: a command and its ranks, or the ranks of mpiexec. Where anything is in the way, a process decodes for itself.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

LIMIT_S = 60.0
"""How long a process waits for what another decodes, before it does so itself."""
_ASK_AGAIN_S = 0.001
_ALIGN = 64
_LONGEST_LISTING = 1 << 16
_CREDENTIALS = struct.Struct("3i")  # process, user and group

Array = np.ndarray[Any, np.dtype[Any]]
Decode = Callable[[], Sequence[Array]]


def lent(files: Sequence[Path | None], options: Sequence[object], decode: Decode) -> list[Array]:
    """The arrays that `decode` makes of these files under these options, once for all processes of a user on this host.

    Who writes to them gets a copy of what it changes.
    """
    address = _address(files, options)
    if address and sys.platform == "linux":
        with suppress(OSError):
            return _borrowed_or_lent(address, decode)
    return list(decode())


def _address(files: Sequence[Path | None], options: Sequence[object]) -> str:
    """Runs that would decode the same meet here, and share what none of them changes. Empty where a file is not there,
    or has a path that no file can have: `decode` will say it."""
    try:
        states = [os.stat(file) if file else None for file in files]
    except (OSError, ValueError):
        return ""
    known = [[at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns] if at else None for at in states]
    key = hashlib.sha256(json.dumps([known, *options]).encode()).hexdigest()
    return f"\0hocket-{os.geteuid()}-{key[:32]}"


def _borrowed_or_lent(address: str, decode: Decode) -> list[Array]:
    until = time.monotonic() + LIMIT_S
    while (left_s := until - time.monotonic()) > 0:
        lender = socket.socket(socket.AF_UNIX)
        try:
            lender.bind(address)
        except OSError as error:
            lender.close()
            if error.errno != errno.EADDRINUSE:
                raise
            if found := _borrowed(address, left_s):
                return found
            time.sleep(_ASK_AGAIN_S)
        else:
            return _lent(lender, decode)
    return list(decode())


def _borrowed(address: str, limit_s: float) -> list[Array] | None:
    """What another process decodes, or has; None where it does not listen yet, or has given up."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(limit_s)
        try:
            line.connect(address)
            if _user(line) != os.geteuid():
                raise PermissionError(f"{address} is another user's")
            listing, descriptors, _, _ = socket.recv_fds(line, _LONGEST_LISTING, 1)
        except (ConnectionError, BlockingIOError, TimeoutError):
            return None
    if not descriptors:
        return None
    try:
        return _arrays(_mapped(descriptors[0]), json.loads(listing))
    finally:
        os.close(descriptors[0])


def _lent(lender: socket.socket, decode: Decode) -> list[Array]:
    """Decode, and lend for as long as any of the arrays is in use here."""
    descriptor = -1
    try:
        lender.listen()
        os.register_at_fork(after_in_child=lender.close)  # a child would not answer, and may outlive us
        arrays = decode()
        descriptor = os.memfd_create("hocket-samples")
        listing = _written(descriptor, arrays)
        memory = _mapped(descriptor)
    except BaseException:
        _close(lender, descriptor)
        raise
    threading.Thread(target=_lend, args=(lender, descriptor, listing), name="lender", daemon=True).start()
    weakref.finalize(memory, _stop, lender)
    return _arrays(memory, json.loads(listing))


def _lend(lender: socket.socket, descriptor: int, listing: bytes) -> None:
    while True:
        try:
            line, _ = lender.accept()
        except OSError:  # it was stopped
            break
        with line, suppress(OSError):
            if _user(line) == os.geteuid():
                socket.send_fds(line, [listing], [descriptor])
    _close(lender, descriptor)


def _stop(lender: socket.socket) -> None:
    with suppress(OSError):
        lender.shutdown(socket.SHUT_RDWR)


def _close(lender: socket.socket, descriptor: int) -> None:
    lender.close()
    if descriptor >= 0:
        os.close(descriptor)


def _user(line: socket.socket) -> int:
    """Whose the process at the other end is."""
    _, user, _ = _CREDENTIALS.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


def _written(descriptor: int, arrays: Sequence[Array]) -> bytes:
    """Put arrays into the memory; what `_arrays` needs to find them there."""
    listing, end = [], 0
    for array in arrays:
        listing.append([array.dtype.str, array.shape, end])
        end += -(-array.nbytes // _ALIGN) * _ALIGN
    os.posix_fallocate(descriptor, 0, max(end, 1))
    for place, array in zip(_arrays(mmap.mmap(descriptor, 0), listing), arrays, strict=True):
        place[...] = array
    return json.dumps(listing).encode()


def _mapped(descriptor: int) -> mmap.mmap:
    return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)


def _arrays(memory: mmap.mmap, listing: Sequence[Any]) -> list[Array]:
    return [np.ndarray(shape, dtype, memory, offset) for dtype, shape, offset in listing]
