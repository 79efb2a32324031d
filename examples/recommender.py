"""A recommender: people and films as vectors, learnt from ratings, with or without a parameter server.

    hocket launch -n 2 examples/recommender.py
    hocket launch -n 3 examples/recommender.py server:mode=async,stale=none,lookahead=0    # two workers and a server
    mpiexec -n 2 python examples/recommender.py
    torchrun --nproc-per-node 2 examples/recommender.py
    python examples/recommender.py

The ratings are made up: each person likes films whose hidden vector resembles their own, plus noise of 0.3, so that no
recommender can be off by less on average (root of mean squares). Under `server:mode=async` nobody waits for anybody:
the workers draw their batches from one pool, and who is fast takes more of them. What that mode does by default against
staleness (`stale`, `lookahead`) is made for steps of SGD and for many workers; two that share Adam do better without.
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hocket

PEOPLE, FILMS, RATINGS, NOISE = 300, 120, 12_000, 0.3
EPOCHS, BATCH = 12, 150


def ratings() -> tuple[Tensor, Tensor, Tensor]:
    """Who rated what, and how."""
    g = torch.Generator().manual_seed(0)
    pairs = torch.randperm(PEOPLE * FILMS, generator=g)[:RATINGS]
    person, film = pairs // FILMS, pairs % FILMS
    tastes, kinds = torch.randn(PEOPLE, 3, generator=g) / 3**0.5, torch.randn(FILMS, 3, generator=g)
    liked = (tastes[person] * kinds[film]).sum(1) + torch.randn(FILMS, generator=g)[film] / 2
    return person, film, 3 + liked + NOISE * torch.randn(RATINGS, generator=g)


class Recommender(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.person, self.film = nn.Embedding(PEOPLE, width), nn.Embedding(FILMS, width)
        self.person_bias, self.film_bias = nn.Embedding(PEOPLE, 1), nn.Embedding(FILMS, 1)
        self.middle = nn.Parameter(torch.tensor(3.0))
        for table in (self.person, self.film, self.person_bias, self.film_bias):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, person: Tensor, film: Tensor) -> Tensor:
        match = (self.person(person) * self.film(film)).sum(1)
        return self.middle + match + self.person_bias(person)[:, 0] + self.film_bias(film)[:, 0]


def main() -> None:
    strategy = sys.argv[1] if len(sys.argv) > 1 else "allreduce"
    person, film, rating = ratings()
    known = RATINGS * 9 // 10

    def rmse(model: nn.Module) -> dict[str, float]:
        return {"rmse": float(F.mse_loss(model(person[known:], film[known:]), rating[known:]).sqrt())}

    torch.manual_seed(0)
    model = Recommender()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    with hocket.join(strategy) as team:
        model, optimizer = team.prepare(model, optimizer)  # a server serves here, and its script ends
        data = TensorDataset(person[:known], film[:known], rating[:known])
        loader = team.shard(data, batch_size=BATCH // team.size)
        first = team.evaluate(rmse)
        for _ in range(EPOCHS):
            for who, what, how in loader:
                optimizer.zero_grad()
                F.mse_loss(model(who, what), how).backward()
                optimizer.step()

    if team.rank == 0:
        with torch.no_grad():
            print(f"off by {first['rmse']:.3f} before, {rmse(model)['rmse']:.3f} after; at best {NOISE}")
            best = model(torch.zeros(FILMS, dtype=torch.int64), torch.arange(FILMS)).topk(5).indices
        print(f"for person 0: films {best.tolist()}")


if __name__ == "__main__":
    main()
