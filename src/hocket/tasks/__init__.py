"""Tasks that ship with Hocket, and what a task is made of."""

from hocket.tasks import blobs, digits, factorization, linear, mnist  # noqa: F401 - importing a recipe registers it
from hocket.tasks.base import Progress, Recipe, SampleSet, Task, accuracy, task

__all__ = ["Progress", "Recipe", "SampleSet", "Task", "accuracy", "task"]
