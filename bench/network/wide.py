"""An MLP of 4 million parameters on MNIST: as many bytes a step as a small network can hardly carry."""

from __future__ import annotations

import torch
from torch import nn

import hocket
from hocket.run.loading import load_task


def load() -> object:
    return tuple(samples.take(torch.arange(len(samples))) for samples in load_task("mnist-mlp", 0, "", "").load())


task = hocket.Task(
    model=lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(784, 1664), nn.ReLU(), nn.Linear(1664, 1664), nn.ReLU(), nn.Linear(1664, 10)
    ),
    data=load,
    batch=256,
    lr=0.2,
    epochs=4,
    target=0.97,
)
