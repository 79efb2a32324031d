"""A perceptron of eight layers on MNIST, 2 million parameters: its way back has something to send from early on."""

from __future__ import annotations

from torch import nn
from wide import load

import hocket

WIDTH, LAYERS = 512, 7


def model() -> nn.Module:
    first = [nn.Flatten(), nn.Linear(784, WIDTH), nn.ReLU()]
    middle = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*first, *middle, nn.Linear(WIDTH, 10))


task = hocket.Task(model=model, data=load, batch=1024, lr=0.1, epochs=2)
