"""Programs whose ranks die, raise or never arrive."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import torch

from hocket.core.comm import Rank
from hocket.core.message import Message


def raises(rank: Rank, argument: dict[str, Any]) -> None:
    """Rank 1 raises while the others wait for it."""
    rank.status.operation = "compute"
    if rank.comm.rank == 1:
        raise ZeroDivisionError("planted")
    rank.comm.all_reduce(torch.ones(3))


def dies(rank: Rank, argument: dict[str, Any]) -> None:
    """Rank 1's process is killed in the middle of the work."""
    for step in range(100):
        rank.status.step = step
        rank.comm.all_reduce(torch.ones(1000))
        if step == 50 and rank.comm.rank == 1:
            time.sleep(0.5)  # for its last status to arrive
            os.kill(os.getpid(), signal.SIGKILL)


def never_arrives(rank: Rank, argument: dict[str, Any]) -> None:
    """Rank 1 does not come to the meeting."""
    if rank.comm.rank == 1:
        threading.Event().wait(300)
    if argument["operation"] == "recv":
        rank.comm.recv(1)
    else:
        rank.comm.all_reduce(torch.ones(3))


def deadlock(rank: Rank, argument: dict[str, Any]) -> None:
    """Everyone waits for the left neighbour, and nobody sends first."""
    left = (rank.comm.rank - 1) % rank.comm.size
    _, msg = rank.comm.recv(left, tag=4)
    rank.comm.send(left, msg)


def waits_in_vain(rank: Rank, argument: dict[str, Any]) -> str:
    """A receive with a time-out of its own gives up, and the run goes on."""
    outcome = ""
    if rank.comm.rank == 0:
        try:
            rank.comm.recv(1, tag=9, timeout=0.2)
        except TimeoutError:
            outcome = "timed out"
    else:
        rank.comm.send(0, Message("other tag"), tag=8)
    rank.comm.barrier()
    return outcome


def works(rank: Rank, argument: dict[str, Any]) -> list[int]:
    """Keep in step until told to stop; tells where it stopped, and what all added up to."""
    step, total = 0, torch.zeros(1)
    rank.tell("began", {}, b"")
    while True:
        step += 1
        rank.status.step = step
        rank.comm.all_reduce(total.fill_(step))
        time.sleep(0.001 * rank.comm.rank)
        if rank.brake.pauses_after(step):
            return [step, int(total)]


def gets_stuck(rank: Rank, argument: dict[str, Any]) -> None:
    """Takes some steps, and never another one."""
    for step in range(argument["steps"]):
        rank.brake.pauses_after(step)
    rank.tell("began", {}, b"")
    threading.Event().wait(300)


def collects(rank: Rank, argument: dict[str, Any]) -> list[list[float]]:
    """Collectives on tensors that do not lie in one piece, as those on a GPU do not lie in main memory."""
    n = rank.comm.size

    def apart(*values: float) -> torch.Tensor:
        return torch.tensor([values, values], dtype=torch.float32).t()[:, 0]

    mean, root, pieces, everyone = apart(*range(n)), apart(rank.comm.rank), apart(0.0), apart(*[0.0] * n)
    rank.comm.all_reduce(mean.add_(rank.comm.rank), "mean")
    rank.comm.broadcast(root, 1)
    rank.comm.reduce_scatter(pieces, apart(*range(n)))
    rank.comm.all_gather(everyone, apart(float(rank.comm.rank)))
    return [mean.tolist(), root.tolist(), pieces.tolist(), everyone.tolist()]


def falls_silent(rank: Rank, argument: dict[str, Any]) -> None:
    """Rank 1's process is stopped while nobody waits for it."""
    for step in range(3):
        rank.status.step = step
        time.sleep(0.3)
    if rank.comm.rank == 1:
        rank.status.operation = "compute"
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)


def holds_the_lock(rank: Rank, argument: dict[str, Any]) -> int:
    """Rank 1 computes for long in C, where no other thread of its process can run: not even the one that reports."""
    began = time.monotonic()
    count = 0
    while rank.comm.rank == 1 and time.monotonic() < began + argument["seconds"]:
        count += sum(range(100_000_000)) > 0
    return count


def dies_after_a_fork(rank: Rank, argument: dict[str, Any]) -> None:
    """Rank 1 leaves a child that lives on with all that it had open."""
    if rank.comm.rank == 1:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def ends_early(rank: Rank, argument: dict[str, Any]) -> None:
    if rank.comm.rank == 1:
        os._exit(3)
    time.sleep(60)


def serves(rank: Rank, argument: dict[str, Any]) -> None:
    """Rank 0 answers whoever asks; rank 2 is killed between two requests."""
    payload = Message("x", (), (torch.zeros(100_000),))
    step = 0
    while True:
        step += 1
        rank.status.step = step
        if rank.comm.rank == 0:
            source, _ = rank.comm.recv()
            rank.comm.isend(source, payload)
        else:
            rank.comm.send(0, payload)
            rank.comm.recv(0)
            if step == 200 and rank.comm.rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)


def sends_much(rank: Rank, argument: dict[str, Any]) -> list[float]:
    """Thousands of messages that nobody waits for: the most that were kept, and seconds for each thousand."""
    most, seconds = 0, []
    for _ in range(argument["thousands"]):
        began = time.monotonic()
        for i in range(1000):
            if rank.comm.rank == 0:
                rank.comm.isend(1, Message("n", (i,), (torch.zeros(100),)))
                most = max(most, _kept(rank.comm))
            elif rank.comm.rank == 1:
                assert rank.comm.recv(0)[1].ints == (i,)
        seconds.append(time.monotonic() - began)
    rank.comm.barrier()
    return [most, *seconds]


def _kept(comm: Any) -> int:
    sending = comm.native._sending
    return sum(len(queue) for queue in sending.values()) if isinstance(sending, dict) else len(sending)


def waits_for_what_was_sent(rank: Rank, argument: dict[str, Any]) -> int:
    """A request may be waited for long after its message has left, and twice."""
    requests = []
    for i in range(300):
        if rank.comm.rank == 0:
            requests.append(rank.comm.isend(1, Message("n", (i,))))
        elif rank.comm.rank == 1:
            rank.comm.recv(0)
    for request in requests:
        request.wait()
        request.wait()
    return len(requests)


def counts(rank: Rank, argument: dict[str, Any]) -> list[list[int]]:
    """Counters of two connections in one process: what each handed out here."""
    import importlib

    engine = importlib.import_module(f"hocket.engines.{argument['engine']}")
    taken = []
    for _ in range(3):
        comm = engine.connect(30.0)
        counter = comm.counter()
        taken.append([counter.take(), counter.take(3), counter.take()])
        counter.close()
    return taken


def healthy(rank: Rank, argument: dict[str, Any]) -> dict[str, Any]:
    """Nothing goes wrong in these."""
    return {each.__name__: each(rank, argument) for each in (sends_much, waits_for_what_was_sent, counts, collects)}


def listens(rank: Rank, argument: dict[str, Any]) -> None:
    """Stay for as long as the starter looks at us, with every kind of connection open."""
    rank.comm.all_reduce(torch.ones(10))
    counter = rank.comm.counter()
    counter.take()
    rank.comm.barrier()
    rank.tell("look", {}, b"")
    rank.comm.barrier()
    time.sleep(0.5)
    counter.close()


def stays(rank: Rank, argument: dict[str, Any]) -> None:
    rank.comm.barrier()
    sys.stdout.write("here\n")  # in one piece: a launcher mixes what ranks write
    sys.stdout.flush()
    time.sleep(100)


def dies_in_a_collective(rank: Rank, argument: dict[str, Any]) -> None:
    """Rank 1 is killed from outside its own code, wherever that finds it: mostly among collectives."""
    x = torch.ones(argument["length"])
    rank.comm.all_reduce(x)
    if rank.comm.rank == 1:
        threading.Timer(argument["after_s"], os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        rank.status.step += 1
        rank.comm.all_reduce(x, "max")
        rank.comm.broadcast(x)


def says_where_it_may_run(rank: Rank, argument: dict[str, Any]) -> list[int]:
    """The cores that this rank is tied to."""
    return sorted(os.sched_getaffinity(0))


def meets_before_its_message_has_left(rank: Rank, argument: dict[str, Any]) -> float:
    """Rank 0 sends more than any buffer takes and goes to the meeting; rank 1 comes there only when it has all."""
    total = 0.0
    for _ in range(5):
        if rank.comm.rank == 0:
            rank.comm.isend(1, Message("long", (), (torch.ones(argument["length"]),)))
        elif rank.comm.rank == 1:
            total += float(rank.comm.recv(0)[1].tensors[0].sum())
        rank.comm.barrier()
    return total
