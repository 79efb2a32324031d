"""Tasks that ship with Hocket, and what a task is made of."""

from hocket.tasks import (  # noqa: F401 - importing a recipe registers it
    blobs,
    digits,
    factorization,
    linear,
    mnist,
    word2vec,
)
from hocket.tasks.base import Progress, Recipe, SampleSet, Task, accuracy, task

__all__ = ["Progress", "Recipe", "SampleSet", "Task", "accuracy", "task"]
