"""Handwritten digits with a small convolutional network, a checkpoint after every epoch, and a result at the end.

    hocket launch -n 2 examples/image_classifier.py [CHECKPOINT]
    mpiexec -n 2 python examples/image_classifier.py
    torchrun --nproc-per-node 2 examples/image_classifier.py
    python examples/image_classifier.py

The loop is PyTorch's; `team` adds the other workers. Stop it and start it again with the same CHECKPOINT: it goes on
where it was. The data (1797 digits of 8 x 8 pixels) come with scikit-learn.
"""

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hocket

EPOCHS, BATCH = 8, 64  # the batch of all workers together
TEST = 360


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def main() -> None:
    checkpoint = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)

    def accuracy(model: nn.Module) -> dict[str, float]:
        right = model(images[:TEST]).argmax(1) == labels[:TEST]
        return {"accuracy": float(right.float().mean())}

    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with hocket.join("allreduce") as team:
        model, optimizer = team.prepare(model, optimizer)
        loader = team.shard(TensorDataset(images[TEST:], labels[TEST:]), batch_size=BATCH // team.size)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
        first = 0
        if checkpoint and checkpoint.exists():
            first = team.load(checkpoint, scheduler=scheduler)["epoch"] + 1
        for epoch in range(first, EPOCHS):
            for inputs, targets in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
            scheduler.step()
            found = team.evaluate(accuracy)
            if team.rank == 0:
                print(f"epoch {epoch}: accuracy {found['accuracy']:.3f}")
            if checkpoint:
                team.save(checkpoint, scheduler=scheduler, epoch=epoch)

    result = team.result()  # the same on every worker
    if team.rank == 0:
        print(f"{result.workers} workers, {result.epochs:g} epochs, {result.bytes_sent} bytes sent")
        model.eval()  # an ordinary module again: save it, export it, use it
        with torch.no_grad():
            print(f"final accuracy {accuracy(model)['accuracy']:.3f}")


if __name__ == "__main__":
    main()
