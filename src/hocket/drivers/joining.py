"""`with hocket.join(...) as team`: find the other ranks, wherever they were started."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any

import torch

from hocket.core.comm import Rank
from hocket.core.environment import inside_mpi, inside_torchrun, launched_rank
from hocket.core.errors import CommError, UserError, shown
from hocket.core.frames import users_frames, why
from hocket.core.speaking import PASS_ON_S, Abort, await_turn, exit_status
from hocket.core.status import Status
from hocket.drivers.plan import compressor_for
from hocket.drivers.team import Team
from hocket.engines import mpi
from hocket.engines import torch as torch_engine
from hocket.engines.catalogue import DEADLINE_S, engine
from hocket.engines.local import LocalComm, current
from hocket.engines.threads import Threads, ThreadWorld
from hocket.layouts.mesh import Layout, Mesh
from hocket.strategies import Strategy
from hocket.strategies import strategy as strategies


def _briefly(
    number: int,
    abort: Abort | None,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Show a mistake by the user's own lines and one of ours, and end all ranks; anything else as Python does."""
    if not isinstance(error, (UserError, CommError)):
        sys.__excepthook__(kind, error, trace)
        return
    await_turn(number, error)
    if lines := users_frames("".join(traceback.format_tb(trace))):
        print(lines, file=sys.stderr)
    print(f"hocket: {error}", file=sys.stderr, flush=True)
    if abort is not None:
        time.sleep(PASS_ON_S)
        abort(exit_status(error))


@contextmanager
def join(
    strategy: str = "allreduce",
    *,
    compress: str = "none",
    layout: str = "",
    seed: int = 0,
    deadline: float = DEADLINE_S,
) -> Iterator[Team]:
    """Join the ranks that `hocket launch`, mpiexec or torchrun started; alone, be a team of one.

    `layout` splits the model over ranks, such as `tensor=2`; a worker is then all ranks that have parts of one model.
    `deadline` is how many seconds a rank waits for another; under `hocket launch` its `--deadline` counts.

    A strategy with servers takes the last ranks for them: these serve inside `team.prepare`, and their script ends
    there when the others are done.
    """
    unseen = sys.excepthook is sys.__excepthook__  # nobody else shows errors here
    if unseen:
        sys.excepthook = partial(_briefly, launched_rank(), None)
    threads = torch.get_num_threads()
    rank, abort = _find_rank(deadline)
    rank.tell("joined", {}, b"")
    if unseen and abort is not None:
        sys.excepthook = partial(_briefly, rank.comm.rank, abort)
    try:
        team = _team(rank, strategy, compress, layout, seed)
    except UserError:  # on all ranks, who may go on with something else
        torch.set_num_threads(threads)
        raise
    try:
        try:
            yield team
        except SystemExit as ending:
            if ending.code in (None, 0) and not team.is_server:
                team.finish()  # all may have left so; if not, it is said who did
            raise
        team.finish()
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            raise
        if abort is not None and rank.comm.size > 1:
            await_turn(rank.comm.rank, error)
            print(f"hocket: {why(error, rank.comm.rank, rank.status.operation)}", file=sys.stderr, flush=True)
            time.sleep(PASS_ON_S)
            abort(exit_status(error))
            if isinstance(error, (UserError, CommError)):
                raise SystemExit(exit_status(error)) from None  # all is said
        raise
    finally:
        torch.set_num_threads(threads)


def _team(rank: Rank, strategy: str, compress: str, layout: str, seed: int) -> Team:
    """Refuses what cannot run here."""
    if not isinstance(strategy, str):
        raise UserError(f"hocket.join takes a strategy as text, such as 'local-sgd:every=8'; got {shown(strategy)}")
    chosen = strategies.make(strategy)
    compressor = compressor_for(compress, chosen)
    how = Layout.parse(layout)
    workers = _workers(rank, chosen, how)
    if layout:
        how = how.over(workers)
        workers = how.data
    chosen.check(workers)
    mesh = Mesh(rank.comm, how) if how.ranks > 1 else None
    return Team(rank, chosen, strategy, workers, seed, compressor, mesh)


def _workers(rank: Rank, chosen: Strategy, layout: Layout) -> int:
    """The ranks that are no servers; refuses a strategy that cannot run on them."""
    if missing := chosen.needs - rank.offers:
        able = " or ".join(name for name in engine if chosen.needs <= engine[name].offers)
        raise UserError(f"strategy {chosen.name} needs {', '.join(sorted(missing))}; start the ranks on engine {able}")
    servers = chosen.server_ranks() * layout.ranks
    workers = rank.comm.size - servers
    if workers < layout.ranks:
        raise UserError(
            f"strategy {chosen.name} takes {servers} ranks as servers, which leaves no worker of "
            f"{rank.comm.size}; start {servers + layout.ranks} ranks or more, such as with hocket launch -n"
        )
    return workers


def _find_rank(deadline: float) -> tuple[Rank, Abort | None]:
    """This process's or thread's place, and how to end all ranks where nobody else would."""
    if (found := current.get()) is not None:
        return found, None
    world = ThreadWorld(1, deadline)

    def tell(kind: str, data: dict[str, Any], blob: bytes) -> None:
        pass

    def rank(comm: Any, cls: Any) -> Rank:
        return Rank(comm, world.clock(0), tell, Status(), cls.offers, engine=cls.name)

    torch.set_num_threads(1)  # a worker has one, however many there are
    if inside_torchrun():
        return rank(torch_engine.connect(deadline), torch_engine.TorchDistributed), torch_engine.abort
    if inside_mpi():
        return rank(mpi.connect(deadline), mpi.Mpi), mpi.abort
    return rank(LocalComm(world, 0, [0], 0), Threads), None
