"""PMI, through which MPICH's ranks find each other while they are initialised; spoken by mpiexec, or here.

On one machine Hocket answers itself, over a pair of sockets to each rank. MPICH's own mpiexec listens on every network
interface, puts a process between us and the ranks, and ends them in its own ways and times.
"""

from __future__ import annotations

import os
import secrets
import socket
import time

from hocket.core.speaking import PASS_ON_S

_LIMITS = "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024"


def end_all(status: int) -> None:
    """Let MPICH's mpiexec, if it started this process, end all ranks: it would not if one ends without MPI. Other
    launchers do."""
    if "MPI_LOCALRANKID" in os.environ and (fd := os.environ.get("PMI_FD")):  # Slurm has another protocol there
        time.sleep(PASS_ON_S)
        os.write(int(fd), f"cmd=abort exitcode={status}\n".encode())


class Wireup:
    """Serves version 1.1 of the protocol to `size` ranks. Lines of `key=value` words, each with one answer."""

    def __init__(self, size: int) -> None:
        pairs = [socket.socketpair() for _ in range(size)]
        self.sockets = [ours for ours, _ in pairs]
        self._theirs = [theirs for _, theirs in pairs]
        self._name = f"hocket_{secrets.token_hex(16)}"  # MPICH names its shared memory after it: nobody else's
        self._values = {"PMI_process_mapping": f"(vector,(0,1,{size}))"}
        self._unread = [b""] * size
        self._waiting: set[int] = set()

    def environment(self, rank: int) -> tuple[dict[str, str], int]:
        """What the rank finds in its environment, and the descriptor that it must inherit."""
        size, fd = len(self.sockets), self._theirs[rank].fileno()
        return {
            "PMI_FD": str(fd),
            "PMI_RANK": str(rank),
            "PMI_SIZE": str(size),
            "MPI_LOCALRANKID": str(rank),
            "MPI_LOCALNRANKS": str(size),
        }, fd

    def started(self) -> None:
        """All ranks have their ends; ours close when they do."""
        for theirs in self._theirs:
            theirs.close()

    def serve(self, rank: int) -> bool:
        """Answer what a rank has said. False when it has gone."""
        try:
            said = self.sockets[rank].recv(65536)
        except OSError:
            said = b""
        *lines, self._unread[rank] = (self._unread[rank] + said).split(b"\n")
        for line in lines:
            self._answer(rank, line.decode())
        return bool(said)

    def _answer(self, rank: int, line: str) -> None:
        head, _, value = line.partition(" value=")  # a value may hold blanks; it is always the last
        words = dict(word.partition("=")[::2] for word in head.split())
        match words["cmd"]:
            case "init":
                self._say(rank, "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0")
            case "get_maxes":
                self._say(rank, _LIMITS)
            case "get_appnum":
                self._say(rank, "cmd=appnum appnum=0")
            case "get_universe_size":
                self._say(rank, f"cmd=universe_size size={len(self.sockets)}")
            case "get_my_kvsname":
                self._say(rank, f"cmd=my_kvsname kvsname={self._name}")
            case "put":
                self._values[words["key"]] = value
                self._say(rank, "cmd=put_result rc=0 msg=success")
            case "get" if words["key"] in self._values:
                self._say(rank, f"cmd=get_result rc=0 msg=success value={self._values[words['key']]}")
            case "get":
                self._say(rank, "cmd=get_result rc=-1 msg=key_not_found value=unknown")
            case "barrier_in":
                self._waiting.add(rank)
                if len(self._waiting) == len(self.sockets):
                    self._waiting.clear()
                    for everyone in range(len(self.sockets)):
                        self._say(everyone, "cmd=barrier_out")
            case "finalize":
                self._say(rank, "cmd=finalize_ack")

    def _say(self, rank: int, line: str) -> None:
        try:
            self.sockets[rank].sendall(line.encode() + b"\n")
        except OSError:
            pass  # a rank that died meanwhile is told of elsewhere
