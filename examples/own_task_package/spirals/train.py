"""The task. Every worker imports this file, by name; `python -m spirals.train` trains it."""

from __future__ import annotations

import hocket
from hocket.tasks import Progress

from .data import samples
from .model import accuracy, network, top2


def tell(progress: Progress) -> None:
    """Called by every worker after each epoch; one speaks."""
    if progress.worker == 0 and "validation_accuracy" in progress.judged:
        found = progress.judged["validation_accuracy"]
        print(f"epoch {progress.epoch:g}: validation accuracy {found:.3f} at a rate of {progress.lr:.3f}")


task = hocket.Task(
    model=network,
    data=samples,
    validation=0.1,
    metrics={"accuracy": accuracy, "top2": top2},
    target=0.9,
    epochs=10,
    batch=16,
    lr=0.01,
    optimizer="adamw:betas=0.9/0.95,weight_decay=0.01",
    schedule="cosine-annealing:eta_min=0.0005",
    on_epoch=tell,
)

if __name__ == "__main__":
    result = hocket.fit(task, workers=2, clip=1.0)
    print(f"test accuracy {result.test_metric:.3f}, top 2 {result.metrics['top2']:.3f}")
