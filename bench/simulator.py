"""What the simulator costs: 64 workers on blobs, against the same gradients computed one after the other."""

from __future__ import annotations

import time

from common import Measured, compare, say_where

import hocket
from hocket.tasks import task

WORKERS, EPOCHS = 64, 4


def main() -> None:
    import torch
    from torch.nn import functional as F

    torch.set_num_threads(1)
    recipe = task.make("blobs").make(0, None)
    train, _ = recipe.load()
    inputs, targets = train.take(torch.arange(len(train)))
    batch = recipe.batch

    def simulated() -> Measured:
        result = hocket.fit(
            "blobs", strategy="allreduce", engine="sim", workers=WORKERS, epochs=EPOCHS, trace=0, progress=False
        )
        return Measured(result.seconds, result.test_metric or 0.0)

    def gradients() -> Measured:
        model = recipe.build_model(0)
        began = time.perf_counter()
        for _ in range(EPOCHS):
            for index in torch.randperm(len(inputs)).split(batch):
                model.zero_grad()
                F.cross_entropy(model(inputs[index]), targets[index]).backward()
        return Measured(time.perf_counter() - began)

    say_where()
    compare("sim, 64 workers", simulated, "gradients alone", gradients, "s")


if __name__ == "__main__":
    main()
