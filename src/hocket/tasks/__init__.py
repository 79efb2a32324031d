"""Tasks that ship with Hocket, and what a task is made of."""

from hocket.tasks import blobs, digits, factorization, linear, mnist, word2vec  # noqa: F401 - importing a recipe registers it
from hocket.tasks.base import Recipe, SampleSet, Task, accuracy, task

__all__ = ["Recipe", "SampleSet", "Task", "accuracy", "task"]
