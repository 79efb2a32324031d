"""What a gradient or a replica weighs in a mean: the samples that it comes from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)  # made at every step: a frozen one takes four times as long
class Weight:
    """How many samples something stands for: this worker's, and all workers' together."""

    samples: float = 0.0
    of_all: float | None = 0.0
    """None: not known beforehand, as in a loop that is the user's own."""

    def relative(self, workers: int) -> float:
        """What it weighs where the mean weight is 1, of so many workers; their weights must be known."""
        assert self.of_all, "a weighted mean needs a sample"
        return self.samples * workers / self.of_all

    def __add__(self, other: Weight) -> Weight:
        of_all = None if self.of_all is None or other.of_all is None else self.of_all + other.of_all
        return Weight(self.samples + other.samples, of_all)
