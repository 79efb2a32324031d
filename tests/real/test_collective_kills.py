"""A rank that is killed inside a collective ends the run, named: at once if somebody watches, else by the deadline."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
import torch
from covering import covering
from test_failures import PROCESSES, run

from hocket.core.errors import DeadlineExceeded, RankFailed
from hocket.engines.commons import Commons, Patience, load_kernels, nbytes
from hocket.kernels.memory.block import Block

SIZE, KILLED = 3, 1
PATIENCE = Patience(deadline_s=1.0, crowded=True)
NAMED, MISNAMED = 7, 8


def meets_until_someone_is_missing(block: Block, rank: int, length: int) -> int:
    commons, x = Commons(block, SIZE, rank, PATIENCE), torch.ones(length)
    try:
        while True:
            commons.all_reduce(x, "max")
            commons.broadcast(x, 2)
            commons.barrier()
    except DeadlineExceeded as error:
        return NAMED if error.peers == f"rank {KILLED}" else MISNAMED


def test_whoever_waits_names_the_killed_one_at_the_deadline(thorough: bool) -> None:
    """Nobody watches here: ranks are forked, and one of them is killed anywhere, again and again."""
    load_kernels()
    draw = random.Random(0)
    for _ in range(50 if thorough else 8):
        block = Block.anonymous(nbytes(SIZE))
        Commons(block, SIZE, 0, PATIENCE).lay_out()
        length = draw.choice([3, 5000, 400_000])
        pids = []
        for rank in range(SIZE):
            pid = os.fork()
            if pid == 0:
                os._exit(meets_until_someone_is_missing(block, rank, length))
            pids.append(pid)
        time.sleep(draw.uniform(0.0, 0.1))
        os.kill(pids[KILLED], signal.SIGKILL)
        ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        assert ends[KILLED] == -signal.SIGKILL
        # The first to give up ends as well, and others may then wait for it too
        assert NAMED in ends


@pytest.mark.parametrize(("name", "length"), covering(PROCESSES, [10, 1_000_000]))
def test_a_run_names_the_killed_one_at_once(name: str, length: int) -> None:
    with pytest.raises(RankFailed, match="died: killed by SIGKILL") as caught:
        run(name, "dies_in_a_collective", length=length, after_s=0.3)
    assert caught.value.rank == 1
