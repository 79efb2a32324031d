"""A communication-avoiding support vector machine (CA-SVM; You, Demmel, Czechowski, Song and Vuduc, IPDPS 2015).

    hocket launch -n 2 examples/ca_svm.py
    mpiexec -n 2 python examples/ca_svm.py
    torchrun --nproc-per-node 2 examples/ca_svm.py
    python examples/ca_svm.py

Explicit parallelism: change the algorithm so that its parts need not talk. k-means cuts the data into one part a
worker, each worker trains a kernel SVM on its part without a single message, and a new sample is judged by the SVM
whose centre is nearest to it. The time to train a kernel SVM grows faster than the number of its samples, so parts are
less work than the whole; what is lost is what points of different parts could have told each other.
"""

import numpy as np
import torch
from kmeans import kmeans, squared_distances
from sklearn.datasets import load_digits
from sklearn.svm import SVC
from torch import Tensor

import hocket

TEST = 400


def exchange(comm: hocket.Comm, points: Tensor, labels: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
    """Every sample goes to the worker that owns it: this worker's samples."""
    kept = [(points[owner == comm.rank], labels[owner == comm.rank])]
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    sends = [comm.isend(to, hocket.Message("part", (), (points[owner == to], labels[owner == to]))) for to in others]
    for source in others:
        _, message = comm.recv(source)
        kept.append((message.tensors[0], message.tensors[1]))
    for send in sends:
        send.wait()
    return torch.cat([points for points, _ in kept]), torch.cat([labels for _, labels in kept])


class LocalSVM:
    """A kernel SVM of a part of the data, which may happen to have one class alone."""

    def __init__(self, points: Tensor, labels: Tensor) -> None:
        self.only = labels[0].item() if len(labels.unique()) == 1 else None
        self.svm = SVC(kernel="rbf", C=10.0, gamma=0.02 / 16)
        if self.only is None:
            self.svm.fit(points.numpy(), labels.numpy())

    @property
    def support_vectors(self) -> int:
        return 0 if self.only is not None else int(self.svm.n_support_.sum())

    def right(self, points: Tensor, labels: Tensor) -> int:
        """How many samples it judges rightly."""
        if len(points) == 0 or self.only is not None:
            return int((labels == self.only).sum())
        return int(np.sum(self.svm.predict(points.numpy()) == labels.numpy()))


def main() -> None:
    digits = load_digits()
    points, odd = torch.tensor(digits.data), torch.tensor(digits.target % 2)
    with hocket.join() as team:
        comm = team.comm
        mine = slice(TEST + team.rank, None, team.size)  # what this worker happens to hold
        centres, owner, _, _ = kmeans(comm, points[mine], comm.size)
        part, labels = exchange(comm, points[mine], odd[mine], owner)

        before = team.bytes_sent
        svm = LocalSVM(part, labels)
        in_training = team.bytes_sent - before

        nearest = squared_distances(points[:TEST], centres).argmin(1) == team.rank
        right = team.all_reduce(svm.right(points[:TEST][nearest], odd[:TEST][nearest]))
        sizes, support = team.gather(len(part)), team.all_reduce(svm.support_vectors)
        sent = team.all_reduce(in_training)
        if team.rank == 0:
            print(f"parts of {sizes} samples, {support} support vectors, {sent} bytes sent in training")
            print(f"odd or even: accuracy {right / TEST:.3f}")


if __name__ == "__main__":
    main()
