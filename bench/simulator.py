"""What the simulator costs: 64 workers on blobs, against the same gradients computed one after the other.

python bench/simulator.py [--device cuda] [--batched auto|on|off]
"""

from __future__ import annotations

import argparse
import time

from common import Measured, compare, say_where

import hocket
from hocket.tasks import task

WORKERS, EPOCHS = 64, 4


def main() -> None:
    import torch
    from torch.nn import functional as F

    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="cpu")
    options.add_argument("--batched", default="auto")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    recipe = task.make("blobs").make(0, None)
    train, _ = recipe.load()
    inputs, targets = (t.to(chosen.device) for t in train.take(torch.arange(len(train))))
    batch = recipe.batch

    def simulated() -> Measured:
        result = hocket.fit(
            "blobs", strategy="allreduce", engine="sim", workers=WORKERS, epochs=EPOCHS, trace=0, progress=False,
            device=chosen.device, sim={"batched": chosen.batched},
        )  # fmt: skip
        return Measured(result.seconds, result.test_metric or 0.0)

    def gradients() -> Measured:
        model = recipe.build_model(0).to(chosen.device)
        began = time.perf_counter()
        for _ in range(EPOCHS):
            for index in torch.randperm(len(inputs)).split(batch):
                model.zero_grad()
                F.cross_entropy(model(inputs[index]), targets[index]).backward()
        if chosen.device != "cpu":
            torch.cuda.synchronize()
        return Measured(time.perf_counter() - began)

    say_where()
    compare("sim, 64 workers", simulated, "gradients alone", gradients, "s")


if __name__ == "__main__":
    main()
