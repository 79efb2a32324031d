"""Hocket's serial loop against a bare PyTorch loop: mnist-mlp, batch 64, one epoch, one thread."""

from __future__ import annotations

import time

from common import Measured, compare, say_where, speed_of

import hocket
from hocket.tasks import task

BATCH = 64


def main() -> None:
    import torch
    from torch.nn import functional as F

    torch.set_num_threads(1)
    recipe = task.make("mnist-mlp").make(0, None)
    train, test = recipe.load()
    inputs, targets = train.take(torch.arange(len(train)))
    judged = test.take(torch.arange(len(test)))
    own = hocket.Task(model=recipe.model, data=((inputs, targets), judged), batch=BATCH, lr=0.1)

    def ours() -> Measured:
        return speed_of(hocket.fit(own, strategy="serial", engine="threads", epochs=1, progress=False))

    def bare() -> Measured:
        model = recipe.build_model(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        began = time.perf_counter()
        order = torch.randperm(len(inputs))
        for index in order.split(BATCH):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs[index]), targets[index])
            loss.backward()
            optimizer.step()
        speed = len(inputs) / (time.perf_counter() - began)
        with torch.no_grad():
            accuracy = float((model(judged[0]).argmax(-1) == judged[1]).float().mean())
        return Measured(speed, accuracy)

    say_where()
    compare("hocket serial", ours, "bare PyTorch", bare, "samples/s")


if __name__ == "__main__":
    main()
