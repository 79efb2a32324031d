"""What the law tests run on every rank of every engine. One program does it all: starting processes is slow."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from hocket.core.collectives import ALGORITHMS
from hocket.core.comm import ANY, Comm, Rank
from hocket.core.errors import UserError
from hocket.core.message import Message
from hocket.core.replica import Gradient, Replica
from hocket.core.state import Kept
from hocket.core.weight import Weight
from hocket.core.worker import Worker
from hocket.drivers.joining import join
from hocket.drivers.own_loop import run_rank
from hocket.run.resolve import resolve
from hocket.run.spec import RunSpec
from hocket.strategies import strategy
from hocket.tasks import Task

SAMPLES, BATCH, EPOCHS = 37, 4, 3
"""37 samples in batches of 4: the last global batch is uneven for every number of workers, and at 3 workers
it has one sample, so that two workers get nothing."""


def tiny_data(samples: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(7)
    x = torch.randn(samples, 5, generator=g)
    return x, (x @ torch.randn(5, 3, generator=g)).argmax(-1)


def tiny_model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def norm_model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8, track_running_stats=True), nn.Linear(8, 3))


TINY = Task(model=tiny_model, data=lambda: (tiny_data(), tiny_data()), batch=BATCH, epochs=EPOCHS, lr=0.1)
EVEN = Task(model=tiny_model, data=lambda: (tiny_data(1680), tiny_data()), batch=BATCH, epochs=1, lr=0.1)
"""1680 samples: every batch of up to 7 workers is full."""
NORM = Task(model=norm_model, data=lambda: (tiny_data(1680), tiny_data()), batch=2, epochs=1, lr=0.1)
"""With BatchNorm, whose statistics are no gradients. 1680 samples: BatchNorm refuses batches of one, and this many
give up to 8 workers batches of two."""


def spec(workers: int, **settings: Any) -> RunSpec:
    return RunSpec(task="tiny", engine="threads", workers=workers, **settings)


def trained(rank: Rank, task: Task, wanted: RunSpec) -> list[float] | None:
    """The replica (parameters and buffers) that this rank ends with; None on a server."""
    servers = strategy.make(wanted.strategy or task.strategy).server_ranks()
    train, test = task.load()
    plan = resolve(dataclasses.replace(wanted, workers=rank.comm.size - servers), task, len(train))
    made: list[nn.Module] = []

    def model() -> nn.Module:
        assert callable(task.model)
        made.append(task.model())
        return made[-1]

    run_rank(rank, plan, dataclasses.replace(task, model=model), train, test)
    if rank.comm.rank >= plan.workers:
        return None
    tensors = [*made[-1].parameters(), *(b for b in made[-1].buffers() if b.is_floating_point())]
    return torch.cat([t.detach().reshape(-1) for t in tensors]).tolist()


def own_loop(rank: Rank, name: str) -> list[float] | None:
    """The same training as `trained(TINY)`; None on a server, whose script ends inside it."""
    try:
        return users_loop(name)
    except SystemExit:
        return None


def users_loop(name: str) -> list[float]:
    """As a user would write it."""
    x, y = tiny_data()
    with join(strategy=name, seed=3) as team:
        model = TINY.build_model(seed=3 if team.rank == 0 else 99)  # prepare gives everyone rank 0's weights
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = team.prepare(model, optimizer)
        loader = team.shard(TensorDataset(x, y), batch_size=BATCH)
        for _ in range(EPOCHS):
            for inputs, targets in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


def usable(name: str, ranks: int) -> bool:
    """Whether so many ranks can run it."""
    chosen = strategy.make(name)
    if ranks - chosen.server_ranks() < 1:
        return False
    try:
        chosen.check(ranks - chosen.server_ranks())
    except UserError:
        return False
    return True


def comm_facts(rank: Rank) -> dict[str, Any]:
    """Every operation of Comm once, on vectors that do not divide by the number of ranks."""
    comm, n, me = rank.comm, rank.comm.size, rank.comm.rank
    facts: dict[str, Any] = {}
    for op in ("sum", "mean", "max", "min"):
        x = torch.arange(7, dtype=torch.float64) * (me + 1)
        comm.all_reduce(x, op)  # type: ignore[arg-type]
        facts[op] = x.tolist()
    x, y = torch.full((3,), me + 1.0), torch.full((2,), 10.0 * (me + 1))
    pending = [comm.iall_reduce(x), comm.iall_reduce(y)]
    for request in pending:
        request.wait()
    facts["overlapped"] = [*x.tolist(), *y.tolist()]
    gathered = torch.zeros(2 * n, dtype=torch.int64)
    comm.all_gather(gathered, torch.tensor([me, me * me]))
    facts["all_gather"] = gathered.tolist()
    scattered = torch.zeros(2)
    comm.reduce_scatter(scattered, torch.arange(2.0 * n) + me)
    facts["reduce_scatter"] = scattered.tolist()
    root = n - 1
    b = torch.full((4,), float(me))
    comm.broadcast(b, root)
    facts["broadcast"] = b.tolist()
    comm.barrier()
    if n > 1:
        facts |= message_facts(rank)
    part = comm.split(me % 2, -me)
    x = torch.tensor([float(me)])
    part.all_reduce(x)
    facts["split"] = [part.size, x.item()]
    facts["split_again"] = split_again(comm)
    return facts


def split_again(comm: Comm) -> list[float]:
    """Groups of groups, made at one time in several of them: the sums of the ranks in each."""
    sums = []
    for _ in range(3):
        inner = comm.split(comm.rank // 2, comm.rank).split(0, comm.rank)
        x = torch.tensor([float(comm.rank)])
        inner.native.all_reduce(x)
        sums.append(x.item())
    return sums


def message_facts(rank: Rank) -> dict[str, Any]:
    """A ring of messages with two tags, received in the other order; then all to rank 0, from anyone."""
    comm, n, me = rank.comm, rank.comm.size, rank.comm.rank
    facts: dict[str, Any] = {}
    right, left = (me + 1) % n, (me - 1) % n
    value = torch.tensor([[me, 2.5]])
    first = comm.isend(right, Message("first", (me, -5), (value,)), tag=1)
    second = comm.isend(right, Message("second", (), (torch.zeros(0), torch.tensor([True]))), tag=2)
    value += 100  # a message is a value: this must not reach the receiver
    _, late = comm.recv(left, tag=2)
    source, early = comm.recv(left, tag=1)
    first.wait()
    second.wait()
    facts["ring"] = [source, early.kind, list(early.ints), early.tensors[0].tolist(), late.kind]
    facts["ring_shapes"] = [list(t.shape) for t in late.tensors]
    if me == 0:
        facts["anyone"] = sorted(comm.recv(ANY, tag=3)[0] for _ in range(n - 1))
    else:
        comm.send(0, Message("hi"), tag=3)
    return facts


TOGETHER = ["gossip:kind=pull,together=true", "gossip:kind=push,together=true"]


def mixing_facts(rank: Rank, pairwise: bool) -> dict[str, list[float]]:
    """Gossip without gradients, from replicas that differ: what each has after some rounds."""
    n, me = rank.comm.size, rank.comm.rank
    found = {}
    if pairwise:
        found["gossip:kind=adpsgd"] = mixed_pairwise(rank)
    for text in ["gossip:kind=dpsgd", "gossip:kind=sgp", *TOGETHER, "gossip:graph=exponential"]:
        model = Replica(nn.Linear(1, 1, bias=False))
        optimizer = torch.optim.SGD(model.parameters, lr=0.0)
        kept = Kept()
        worker = Worker(rank.comm, rank.clock, model, optimizer, 5, optimizer.step, kept=kept)
        model.x.fill_(float(me))
        steps = strategy.make(text).worker(worker)
        next(steps)
        weights = []
        for _ in range(40):
            worker.step += 1
            steps.send(Gradient(model.g, Weight(1, n)))
            if text == "gossip:kind=sgp":
                weights.append(kept.values["weight"].item())
        found[text] = model.x.tolist()
        if weights:
            found["weights"] = weights
        steps.close()
        rank.comm.barrier()
    assert n > 1
    return found


def mixed_pairwise(rank: Rank) -> list[float]:
    """AD-PSGD without gradients: this replica before the farewell, and the mean of all."""
    n = rank.comm.size
    model = Replica(nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters, lr=0.0)
    worker = Worker(rank.comm, rank.clock, model, optimizer, 5, optimizer.step)
    model.x.fill_(float(rank.comm.rank))
    steps = strategy.make("gossip:kind=adpsgd,graph=complete").worker(worker)
    next(steps)
    for _ in range(200):
        worker.step += 1
        rank.clock.charge(1.0)
        steps.send(Gradient(model.g, Weight(1, n)))
    own = model.x.item()
    try:
        steps.send(None)
    except StopIteration:
        pass
    return [own, model.x.item()]


WITHOUT_SLACK = [
    "server:mode=ssp,slack=0,stale=none,lookahead=0",
    "server:mode=dssp,low=0,high=0,stale=none,lookahead=0",
]
"""Nobody reads before every gradient of a step is in."""


def run_all(rank: Rank, argument: dict[str, Any]) -> dict[str, Any]:
    """Everything the tests in this folder look at, from one start of the ranks."""
    n = rank.comm.size
    found: dict[str, Any] = {"comm": comm_facts(rank)}
    for optimizer in ("sgd", "adam"):
        for momentum in (0.0, 0.9):
            if optimizer == "sgd" or not momentum:
                wanted = spec(
                    n, optimizer=optimizer, momentum=momentum, seed=3, lr=0.01 if optimizer == "adam" else 0.1
                )
                found[f"allreduce/{optimizer}/{momentum}"] = trained(rank, TINY, wanted)
    found["local-sgd:every=1"] = trained(rank, TINY, spec(n, strategy="local-sgd:every=1", seed=3))
    for momentum in ("keep", "average", "reset"):
        wanted = spec(n, strategy=f"local-sgd:every=2,momentum={momentum}", momentum=0.9, seed=3)
        found[f"local-sgd/{momentum}"] = trained(rank, TINY, wanted)
    for case in ("ring", "halving", "tree"):
        found[f"allreduce:algorithm={case}"] = trained(
            rank, TINY, spec(n, strategy=f"allreduce:algorithm={case}", seed=3)
        )
        for length in (0, 1, n - 1, n, 3 * n + 1, 64):
            x = torch.sin(torch.arange(length, dtype=torch.float64) + rank.comm.rank)
            ALGORITHMS[case](rank.comm, x)
            found[f"{case}/{length}"] = x.tolist()
    found["diloco:every=1"] = trained(rank, TINY, spec(n, strategy="diloco:every=1,lr=1,momentum=0", seed=3))
    found["post-local"] = trained(rank, TINY, spec(n, strategy="local-sgd:every=100,post_local=1000", seed=3))
    groups = f"local-sgd:every=2,between=1,group={n}"
    found["one-group"] = trained(rank, TINY, spec(n, strategy=groups, momentum=0.9, seed=3))
    found["groups-of-one"] = trained(rank, TINY, spec(n, strategy="local-sgd:every=1,between=2,group=1", seed=3))
    found["every-second"] = trained(rank, TINY, spec(n, strategy="local-sgd:every=2", seed=3))
    for name in ("gossip:kind=dpsgd", "gossip:kind=sgp", *TOGETHER):
        if usable(name, n):
            found[name] = trained(rank, TINY, spec(n, strategy=name, seed=3))
    if n > 1:
        found["complete"] = trained(rank, TINY, spec(n, strategy="gossip:graph=complete", seed=3, steps=1))
        found["one-step"] = trained(rank, TINY, spec(n, strategy="allreduce", seed=3, steps=1))
        found["mixing"] = mixing_facts(rank, argument["pairwise"])
    for text in WITHOUT_SLACK:
        if usable(text, n):
            wanted = spec(n, strategy=text, seed=3, steps=20, lr=0.1 / (n - 1))
            found[text] = trained(rank, EVEN, wanted)
    texts = ["server:mode=sync", "server:mode=sync,servers=2", "server:mode=async"]
    texts += ["server:mode=async,push_every=2,fetch_every=3", "server:mode=async,pipeline=1"]
    texts += ["gossip:kind=adpsgd", "gossip:kind=pull", "gossip:kind=push"] if argument["pairwise"] else []
    for text in texts:
        if usable(text, n):
            found[text] = trained(rank, TINY, spec(n, strategy=text, seed=3))
    for name in strategy:
        if usable(name, n):
            found[f"fit/{name}"] = trained(rank, TINY, spec(n, strategy=name, seed=3))
            found[f"own/{name}"] = own_loop(rank, name)
            if n == 1:
                found[f"momentum/{name}"] = trained(rank, TINY, spec(n, strategy=name, seed=3, momentum=0.9))
            found[f"norm/{name}"] = trained(rank, NORM, spec(n, strategy=name, seed=3, steps=20))
    return found


def reference(workers: int, task: Task = TINY, **settings: Any) -> list[float]:
    """The serial run with the n-fold batch, in this process."""
    from hocket.engines.catalogue import Listener
    from hocket.engines.threads import Threads

    wanted = dataclasses.replace(spec(1, strategy="serial", **settings), batch=workers * BATCH)
    return Threads().run(lambda rank: trained(rank, task, wanted), 1, Listener())[0]
