"""A strategy of your own: signSGD with majority vote (Bernstein, Wang, Azizzadenesheli and Anandkumar, ICML 2018).

    hocket launch -n 3 examples/own_strategy.py [STRATEGY]
    mpiexec -n 3 python examples/own_strategy.py
    torchrun --nproc-per-node 3 examples/own_strategy.py
    python examples/own_strategy.py

Each worker votes with the signs of its gradient, one byte a parameter where `allreduce` sends four, and all step along
what the majority wants. Compare it with what there is: `own_strategy.py allreduce`. Being registered, it also works in
`hocket.fit(task, strategy="majority-vote")`, with its options, on every engine, and in checkpoints.
"""

import sys
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hocket
from hocket.core.worker import Need, Steps, Strategy, Worker, strategy


@strategy("majority-vote")
@dataclass(frozen=True)
class MajorityVote(Strategy):
    """Step along the sign that most workers' gradients have (Bernstein 2018, algorithm 2)."""

    memory: float = 0.9
    """How much of its past votes a worker remembers: signum; 0 is signSGD."""

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"collectives"})

    @property
    def alike(self) -> bool:
        return True  # all step alike: Hocket looks after that

    def check(self, workers: int) -> None:
        if workers > 127:
            raise hocket.UserError("majority-vote: the votes of more than 127 workers do not fit into a byte")

    def worker(self, w: Worker) -> Steps:
        momentum = w.keep("momentum", torch.zeros_like(w.x))
        while (g := (yield)) is not None:
            if g.samples:  # who got nothing of an uneven last batch has nothing new to say
                momentum.lerp_(g.vector, 1 - self.memory)
            votes = momentum.sign().to(torch.int8)
            w.comm.all_reduce(votes)
            g.vector.copy_(votes.sign())
            w.descend(g)
        w.average_buffers()


def main() -> None:
    chosen = sys.argv[1] if len(sys.argv) > 1 else "majority-vote"
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(3000, 2, generator=generator) * 4 - 2
    inside = (points.square().sum(1) < 1.5).long()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if chosen == "allreduce" else 3e-3)
    with hocket.join(chosen) as team:
        model, optimizer = team.prepare(model, optimizer)
        loader = team.shard(TensorDataset(points[500:], inside[500:]), batch_size=48 // team.size)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        for _ in range(8):
            for inputs, targets in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
            scheduler.step()
        right = team.evaluate(lambda model: float((model(points[:500]).argmax(1) == inside[:500]).float().mean()))
    result = team.result()
    if team.rank == 0:
        print(f"{chosen}: accuracy {right:.3f}, {result.bytes_sent} bytes sent by {result.workers} workers")


if __name__ == "__main__":
    main()
