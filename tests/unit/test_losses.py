"""Losses of an epoch, and the times at which they fell below parts of the first."""

from __future__ import annotations

import math

import pytest
import torch

from hocket.measure.losses import PARTS, WINDOW, Losses, Milestones


def losses(values: list[float], samples: float = WINDOW, first_step: int = 1, began_s: float = 0.0) -> Losses:
    """One entry a second, after `began_s`."""
    count = len(values)
    return Losses(
        torch.tensor(values, dtype=torch.float64),
        torch.full((count,), samples, dtype=torch.float64),
        began_s + 1 + torch.arange(count, dtype=torch.float64),
        first_step + torch.arange(count),
    )


class TestLosses:
    def test_the_mean_is_weighted_by_samples(self) -> None:
        made = Losses.of([(torch.tensor(2.0), 30, 0.1, 1), (torch.tensor(5.0), 10, 0.2, 2)])
        total, samples, bad = made.sums().tolist()
        assert (total / samples, samples, bad) == (2.75, 40, 0)

    def test_sums_of_workers_add_up_to_those_of_all(self) -> None:
        one, two = losses([1.0, 2.0], 3), losses([4.0, math.inf, 0.5], 5)
        fields = ("values", "samples", "seconds", "steps")
        both = Losses(*(torch.cat([getattr(x, name) for x in (one, two)]) for name in fields))
        assert torch.equal(one.sums() + two.sums(), both.sums())

    def test_no_losses_are_no_samples(self) -> None:
        made = Losses.of([])
        assert made.sums().tolist() == [0, 0, 0]
        assert made.diverged_at() is None
        Milestones(1.0).see(made)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_the_first_step_that_is_not_finite_is_named(self, bad: float) -> None:
        made = losses([1.0, 2.0, bad, 3.0, bad], first_step=11)
        assert made.diverged_at() == 13
        assert made.sums()[2] == 2

    def test_a_step_without_samples_has_no_loss_but_counts(self) -> None:
        """Of an uneven last batch a worker may get nothing."""
        entries = [(torch.tensor(loss), 4, 0.0, step) for loss, step in ((1.0, 7), (2.0, 9), (math.nan, 12))]
        assert Losses.of(entries).diverged_at() == 12

    def test_large_but_finite_losses_are_not_divergence(self) -> None:
        made = losses([3e38, 1.0])
        assert made.diverged_at() is None and made.sums()[2] == 0

    def test_they_keep_their_times_and_their_precision(self) -> None:
        made = Losses.of([(torch.tensor(0.1), 7, 1e6 + 1e-4, 1)])
        assert made.seconds.tolist() == [1e6 + 1e-4]
        assert made.values.tolist() == [torch.tensor(0.1).item()]


class TestMilestones:
    def test_each_part_has_the_time_at_which_it_was_first_reached(self) -> None:
        """Batches so large that the running mean is the last loss."""
        found = Milestones(100.0)
        found.see(losses([90, 75, 76, 20, 10.1, 9, 6, 5, 2.6, 2.5], samples=1e6))
        assert found.seconds == {75.0: 2, 50.0: 4, 10.0: 6, 5.0: 8, 2.5: 10}

    def test_one_fall_passes_several(self) -> None:
        found = Milestones(100.0)
        found.see(losses([100, 4], samples=1e6))
        assert found.seconds == {75.0: 2, 50.0: 2, 10.0: 2, 5.0: 2}

    def test_epochs_follow_each_other(self) -> None:
        whole, parts = Milestones(100.0), Milestones(100.0)
        falling = [100 * 0.8**k for k in range(30)]
        whole.see(losses(falling, 500))
        for k in range(0, 30, 7):
            parts.see(losses(falling[k : k + 7], 500, began_s=k))
        assert parts.seconds == whole.seconds
        assert list(whole.seconds) == list(PARTS)[: len(whole.seconds)] and len(whole.seconds) >= 4
        times = list(whole.seconds.values())
        assert times == sorted(times)

    def test_a_time_once_known_stays(self) -> None:
        found = Milestones(100.0)
        found.see(losses([40, 100, 40], samples=1e6))
        found.see(losses([40], samples=1e6, began_s=9))
        assert found.seconds == {75.0: 1, 50.0: 1}

    def test_a_lucky_batch_does_not_count(self) -> None:
        """The running mean goes back over some 2048 samples, and a batch of 16 moves it by less than a hundredth."""
        found = Milestones(100.0)
        found.see(losses([100.0] * 10 + [0.0] + [100.0] * 10, samples=16))
        assert not found.seconds

    @pytest.mark.parametrize("batch", [1, 16, 512])
    def test_the_window_is_in_samples(self, batch: int) -> None:
        """After a loss that falls to 0 at once, the mean is at half after ln 2 windows, whatever the batch."""
        found = Milestones(1.0)
        found.see(losses([0.0] * (2 * WINDOW // batch), samples=batch))
        assert found.seconds[50.0] * batch == pytest.approx(math.log(2) * WINDOW, abs=batch)

    def test_an_empty_batch_moves_nothing(self) -> None:
        found = Milestones(100.0)
        found.see(losses([0.0] * 50, samples=0))
        assert not found.seconds

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_a_run_that_diverged_reaches_nothing_more(self, bad: float) -> None:
        found = Milestones(100.0)
        found.see(losses([60, bad, 1, 1, 1], samples=1e6))
        assert found.seconds == {75.0: 1}

    def test_an_initial_loss_that_is_not_finite_is_never_left_behind(self) -> None:
        found = Milestones(math.nan)
        found.see(losses([1.0, 0.1]))
        assert not found.seconds
