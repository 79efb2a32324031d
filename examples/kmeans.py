"""k-means as a parallel program of its own: no gradients and no strategy, only messages among the workers.

    hocket launch -n 2 examples/kmeans.py
    mpiexec -n 2 python examples/kmeans.py
    torchrun --nproc-per-node 2 examples/kmeans.py
    python examples/kmeans.py

Every worker holds a part of the points. `team.comm` is a `hocket.Comm`: collectives, messages, groups, on any engine.
A round of Lloyd's algorithm needs one all-reduce of the clusters' sums and sizes, however many points there are. Where
the centres begin depends on the points alone, so that any number of workers finds the same clusters.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor

import hocket

CLUSTERS, ROUNDS = 10, 50


def squared_distances(points: Tensor, centres: Tensor) -> Tensor:
    return torch.cdist(points, centres).square()


def far_apart(comm: hocket.Comm, points: Tensor, count: int) -> Tensor:
    """Centres to begin with: the point nearest to the mean, then again and again the farthest from those chosen."""
    mean = torch.cat([points.sum(0), points.new_tensor([len(points)])])
    comm.all_reduce(mean)
    middle = (mean[:-1] / mean[-1]).unsqueeze(0)
    centres = points.new_empty(0, points.shape[1])
    nearest = -squared_distances(points, middle)[:, 0]
    for _ in range(count):
        best = int(nearest.argmax())
        mine = torch.cat([nearest[best : best + 1], points[best]])
        offers = mine.new_empty(comm.size * len(mine))
        comm.all_gather(offers, mine)
        chosen = max(offers.view(comm.size, -1).tolist())  # a tie goes to one and the same point, whoever holds it
        centres = torch.cat([centres, points.new_tensor([chosen[1:]])])
        nearest = squared_distances(points, centres).min(1).values
    return centres


def kmeans(comm: hocket.Comm, points: Tensor, count: int) -> tuple[Tensor, Tensor, float, int]:
    """Centres, the cluster of each of this worker's points, the sum of squared distances over all, and the rounds."""
    centres = far_apart(comm, points, count)
    clusters = torch.full((len(points),), -1)
    rounds = 0
    while rounds < ROUNDS:
        rounds += 1
        distances, found = squared_distances(points, centres).min(1)
        members = torch.nn.functional.one_hot(found, count).to(points.dtype)
        ones, changed = points.new_ones(len(points), 1), (found != clusters).sum().to(points.dtype)
        sums = members.T @ torch.cat([points, ones], 1)  # the last column counts
        message = torch.cat([sums.flatten(), changed[None], distances.sum()[None]])
        comm.all_reduce(message)
        clusters, sums = found, message[:-2].view(count, -1)
        if message[-2] == 0:
            break
        sizes = sums[:, -1:]
        centres = torch.where(sizes > 0, sums[:, :-1] / sizes.clamp(min=1), centres)
    return centres, clusters, float(message[-1]), rounds


def main() -> None:
    digits = load_digits()
    with hocket.join() as team:
        mine = slice(team.rank, None, team.size)
        points, labels = torch.tensor(digits.data[mine]), torch.tensor(digits.target[mine])
        _, clusters, inertia, rounds = kmeans(team.comm, points, CLUSTERS)

        counts = torch.zeros(CLUSTERS, 10)
        counts.index_put_((clusters, labels), torch.ones(len(labels)), accumulate=True)
        team.all_reduce(counts)
        purity = float(counts.max(1).values.sum() / counts.sum())
        sent = team.all_reduce(team.bytes_sent)
        if team.rank == 0:
            print(f"{rounds} rounds, sum of squared distances {inertia:.1f}, {sent} bytes sent")
            print(f"digits in the cluster of their own kind: {purity:.3f}")


if __name__ == "__main__":
    main()
