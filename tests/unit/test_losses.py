"""Losses of an epoch, and the times at which they fell below parts of the first."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hocket.measure.losses import ENTRIES, PARTS, WINDOW, History, Losses, time_to_loss


def losses(values: list[float], samples: float = WINDOW, first_step: int = 1, began_s: float = 0.0) -> Losses:
    """One entry a second, after `began_s`."""
    count = len(values)
    return Losses(
        torch.tensor(values, dtype=torch.float64),
        torch.full((count,), samples, dtype=torch.float64),
        began_s + 1 + torch.arange(count, dtype=torch.float64),
        first_step + torch.arange(count),
    )


def history(*losses: Losses) -> Tensor:
    made = History()
    for part in losses:
        made.add(part.rows())
    return made.sums


class TestLosses:
    def test_the_mean_is_weighted_by_samples(self) -> None:
        made = Losses.of([(torch.tensor(2.0), 30, 0.1, 1), (torch.tensor(5.0), 10, 0.2, 2)])
        samples, total, _ = made.rows().sum(0).tolist()
        assert (total / samples, samples, made.bad()) == (2.75, 40, 0)

    def test_sums_of_workers_add_up_to_those_of_all(self) -> None:
        one, two = losses([1.0, 2.0], 3), losses([4.0, math.inf, 0.5], 5)
        fields = ("values", "samples", "seconds", "steps")
        both = Losses(*(torch.cat([getattr(x, name) for x in (one, two)]) for name in fields))
        torch.testing.assert_close(one.rows().sum(0) + two.rows().sum(0), both.rows().sum(0))
        assert one.bad() + two.bad() == both.bad() == 1

    def test_no_losses_are_no_samples(self) -> None:
        made = Losses.of([])
        assert made.rows().sum(0).tolist() == [0, 0, 0]
        assert made.diverged_at() is None
        assert time_to_loss(1.0, [history(made)]) == {}

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_the_first_step_that_is_not_finite_is_named(self, bad: float) -> None:
        made = losses([1.0, 2.0, bad, 3.0, bad], first_step=11)
        assert made.diverged_at() == 13
        assert made.bad() == 2

    def test_a_step_without_samples_has_no_loss_but_counts(self) -> None:
        """Of an uneven last batch a worker may get nothing."""
        entries = [(torch.tensor(loss), 4, 0.0, step) for loss, step in ((1.0, 7), (2.0, 9), (math.nan, 12))]
        assert Losses.of(entries).diverged_at() == 12

    def test_large_but_finite_losses_are_not_divergence(self) -> None:
        made = losses([3e38, 1.0])
        assert made.diverged_at() is None and made.bad() == 0

    def test_they_keep_their_times_and_their_precision(self) -> None:
        made = Losses.of([(torch.tensor(0.1), 7, 1e6 + 1e-4, 1)])
        assert made.seconds.tolist() == [1e6 + 1e-4]
        assert made.values.tolist() == [torch.tensor(0.1).item()]


def falling(workers: int, seconds: float = 8.0, batch: int = 16, rate: float = 4000.0) -> list[Tensor]:
    """Histories of workers that each take `rate` samples a second, out of step, while the loss is exp(-t)."""
    count = int(seconds * rate / batch)
    made = []
    for worker in range(workers):
        times = (torch.arange(count, dtype=torch.float64) + worker / workers) * batch / rate
        made.append(history(Losses(torch.exp(-times), torch.full_like(times, batch), times, torch.arange(count))))
    return made


class TestTimeToLoss:
    @pytest.mark.parametrize("workers", [1, 4, 16])
    @pytest.mark.parametrize("batch", [1, 16, 512])
    def test_it_is_the_analytic_one(self, workers: int, batch: int) -> None:
        """exp(-t) is at a part p at -ln p, however many workers measure it: a window is not late, and is not longer in
        time for having one worker more."""
        found = time_to_loss(1.0, falling(workers, batch=batch))
        assert list(found) == list(PARTS)
        for part, seconds in found.items():
            assert seconds == pytest.approx(-math.log(part / 100), abs=0.02 + batch / 4000)

    def test_workers_that_are_faster_together_are_there_earlier(self) -> None:
        """What four workers do in a second, one does in four: the loss falls with the samples of all."""
        times = torch.arange(4000, dtype=torch.float64) / 250
        one = Losses(torch.exp(-times), torch.full_like(times, 16), times, torch.arange(4000))
        four = [history(Losses(*(column[w::4] for column in one.columns()))) for w in range(4)]
        quarter = [torch.stack([n, loss, time / 4], 1) for n, loss, time in (h.T for h in four)]
        alone, together = time_to_loss(1.0, [history(one)]), time_to_loss(1.0, quarter)
        assert together == pytest.approx({part: seconds / 4 for part, seconds in alone.items()})

    def test_a_slow_worker_does_not_hold_the_others_up(self) -> None:
        fast, slow = falling(3), losses([0.9], samples=16, began_s=20)
        assert time_to_loss(1.0, [*fast, history(slow)]) == pytest.approx(time_to_loss(1.0, fast), abs=0.01)

    def test_it_does_not_matter_how_the_losses_were_put_by(self) -> None:
        values = [100 * 0.99**k for k in range(600)]
        parts = [losses(values[k : k + 70], 50, began_s=k) for k in range(0, 600, 70)]
        assert time_to_loss(100.0, [history(*parts)]) == time_to_loss(100.0, [history(losses(values, 50))])

    def test_a_long_run_is_remembered_in_few_entries(self) -> None:
        (long,) = falling(1, batch=1, rate=40_000.0)
        assert ENTRIES / 2 <= len(long) <= ENTRIES
        assert long[:, 0].sum() == 8 * 40_000
        found = time_to_loss(1.0, [long])
        assert found[10.0] == pytest.approx(math.log(10), abs=0.02)

    def test_a_lucky_batch_does_not_count(self) -> None:
        assert not time_to_loss(100.0, [history(losses([100.0] * 100 + [0.0] + [100.0] * 100, samples=16))])

    def test_an_empty_batch_moves_nothing(self) -> None:
        assert not time_to_loss(100.0, [history(losses([0.0] * 50, samples=0))])

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_a_run_that_diverged_reaches_nothing_more(self, bad: float) -> None:
        found = time_to_loss(100.0, [history(losses([60.0] * 5 + [bad] + [1.0] * 20))])
        assert list(found) == [75.0]

    @pytest.mark.parametrize("initial", [math.nan, math.inf])
    def test_an_initial_loss_that_is_not_finite_is_never_left_behind(self, initial: float) -> None:
        assert not time_to_loss(initial, [history(losses([1.0, 0.1]))])
