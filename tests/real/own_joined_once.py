"""A small script as users write them: its classes can be pickled, and loaders spawn."""

from __future__ import annotations

import io

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import hocket


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found


def main() -> None:
    x = torch.linspace(-1, 1, 60).view(20, 3)
    with hocket.join() as team:
        model = Net()
        model, optimizer = team.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = team.shard(TensorDataset(x, x[:, :1]), batch_size=5)
        for _ in range(2):
            for inputs, targets in loader:
                optimizer.zero_grad()
                (model(inputs) - targets).square().mean().backward()
                optimizer.step()
            team.evaluate(lambda m: {"mse": float((m(x) - x[:, :1]).square().mean())})
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        assert type(torch.load(file, weights_only=False)) is Net


if __name__ == "__main__":
    main()
