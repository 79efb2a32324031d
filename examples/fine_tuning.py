"""Fine-tuning: a network that has learnt the digits 0 to 4 learns 5 to 9 from 60 samples, most layers frozen.

    hocket launch -n 2 examples/fine_tuning.py
    mpiexec -n 2 python examples/fine_tuning.py
    torchrun --nproc-per-node 2 examples/fine_tuning.py
    python examples/fine_tuning.py

Each stage is a block of its own, as what is trained changes between them: layers are frozen, and heads and optimizers
made, before `team.prepare`. Frozen parameters are neither stepped nor sent. When a block ends, every worker has the
same model, and it is an ordinary module.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hocket

BATCH = 30


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return float((model(images).argmax(1) == labels).float().mean())


def train(model: nn.Module, data: TensorDataset, test: TensorDataset, epochs: int) -> tuple[float, int, int]:
    """One stage: the accuracy at its end, the parameters that it trained, and the worker's rank."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    with hocket.join("allreduce") as team:
        model, optimizer = team.prepare(model, optimizer)
        loader = team.shard(data, batch_size=BATCH // team.size)
        for _ in range(epochs):
            for images, labels in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(images), labels).backward()
                optimizer.step()
        found = team.evaluate(lambda model: accuracy(model, *test.tensors))
    return found, sum(p.numel() for p in trained), team.rank


def main() -> None:
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    low, high = labels < 5, labels >= 5

    torch.manual_seed(0)
    body = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    )  # fmt: skip
    first = nn.Sequential(body, nn.Linear(128, 5))
    seen = TensorDataset(images[low][200:], labels[low][200:])
    found, parameters, rank = train(first, seen, TensorDataset(images[low][:200], labels[low][:200]), epochs=6)
    if rank == 0:
        print(f"digits 0 to 4: {parameters} parameters trained, accuracy {found:.3f}")

    body.requires_grad_(False)
    before = body[0].weight.clone()
    second = nn.Sequential(body, nn.Linear(128, 5))
    few = TensorDataset(images[high][:60], labels[high][:60] - 5)
    found, parameters, rank = train(second, few, TensorDataset(images[high][60:], labels[high][60:] - 5), epochs=40)
    assert torch.equal(body[0].weight, before)
    if rank == 0:
        print(f"digits 5 to 9: {parameters} parameters trained, accuracy {found:.3f}")


if __name__ == "__main__":
    main()
