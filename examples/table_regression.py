"""Regression on a table: the progression of diabetes from ten measurements of 442 patients (with scikit-learn).

    hocket launch -n 2 examples/table_regression.py [STRATEGY]
    mpiexec -n 2 python examples/table_regression.py
    torchrun --nproc-per-node 2 examples/table_regression.py
    python examples/table_regression.py

A scheduler that follows the validation loss must see one number on every worker: `team.evaluate` gives all of them the
loss of the model that the strategy would return now. Any strategy will do: try `local-sgd:every=4`, `diloco`, `gossip`.
"""

import sys

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hocket

EPOCHS, BATCH = 40, 24


def table() -> tuple[Tensor, Tensor]:
    inputs, target = load_diabetes(return_X_y=True)
    order = torch.randperm(len(target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(inputs, dtype=torch.float32)[order], torch.tensor(target, dtype=torch.float32)[order]


def main() -> None:
    strategy = sys.argv[1] if len(sys.argv) > 1 else "local-sgd:every=4"
    inputs, target = table()
    train, validation, test = slice(0, 300), slice(300, 360), slice(360, None)
    mean, spread = inputs[train].mean(0), inputs[train].std(0)  # of what may be known
    inputs = (inputs - mean) / spread
    middle, scale = target[train].mean(), target[train].std()
    scaled = (target - middle) / scale

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    with hocket.join(strategy) as team:
        model, optimizer = team.prepare(model, optimizer)
        loader = team.shard(TensorDataset(inputs[train], scaled[train]), batch_size=BATCH // team.size)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
        for _ in range(EPOCHS):
            for x, y in loader:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
            found = team.evaluate(
                lambda model: {"mse": float(F.mse_loss(model(inputs[validation]), scaled[validation]))}
            )
            scheduler.step(found["mse"])

    if team.rank == 0:
        with torch.no_grad():
            error = model(inputs[test]) * scale + middle - target[test]
        explained = 1 - float(error.square().mean() / (target[test] - middle).square().mean())
        print(f"validation: {found['mse']:.3f} of the variance left; rate at the end {scheduler.get_last_lr()[0]:.2g}")
        print(f"test: off by {float(error.abs().mean()):.1f} on average, R2 {explained:.3f}")


if __name__ == "__main__":
    main()
