"""The simulator plays back times that somebody measured: `compute=times:FILE`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import tiny
from test_batched import task
from tiny import on_sim, simulated

import hocket
from hocket.core.comm import Rank
from hocket.core.errors import UserError
from hocket.engines.catalogue import engine
from hocket.engines.sim import Sim


def written(folder: Path, text: str) -> str:
    path = folder / "measured.txt"
    path.write_text(text)
    return f"times:{path}"


def steps(rank: Rank, count: int = 6) -> list[float]:
    found, before = [], 0.0
    for _ in range(count):
        rank.clock.charge(1.0)
        found.append(rank.clock.now() - before)
        before = rank.clock.now()
    return found


def turned(times: list[float], found: list[float]) -> int:
    """From where on these were played back."""
    for begin in range(len(times)):
        if found == pytest.approx([times[(begin + n) % len(times)] for n in range(len(found))]):
            return begin
    raise AssertionError(f"{found} is not {times} in order")


class TestPlayedBack:
    def test_in_order_and_again_by_each_rank_its_line_and_by_those_beyond_in_turn(self, tmp_path: Path) -> None:
        compute = written(tmp_path, "# of two workers\n1ms 2ms 3ms 4ms 5ms\n\n0.01, 20ms; 30e-3,40ms 50ms # slow\n")
        found = on_sim(steps, 5, compute=compute)
        quick, slow = [0.001, 0.002, 0.003, 0.004, 0.005], [0.01, 0.02, 0.03, 0.04, 0.05]
        begins = {turned(line, times) for line, times in zip([quick, slow, quick, slow, quick], found, strict=True)}
        assert len(begins) == 1, "what was measured at once is played back at once"

    def test_the_seed_says_where_it_begins(self, tmp_path: Path) -> None:
        compute = written(tmp_path, " ".join(f"{n}ms" for n in range(1, 51)))
        one, again, *others = (on_sim(steps, 1, compute=compute, seed=seed) for seed in (1, 1, 2, 3, 4))
        assert one == again and any(other != one for other in others)

    def test_lines_may_differ_in_length(self, tmp_path: Path) -> None:
        found = on_sim(steps, 2, compute=written(tmp_path, "1s\n1s 2s 3s\n"))
        assert found[0] == pytest.approx([1.0] * 6) and sum(found[1]) == pytest.approx(12.0)

    def test_a_share_of_a_batch_and_a_straggler_take_their_share(self, tmp_path: Path) -> None:
        def main(rank: Rank) -> float:
            rank.clock.charge(0.5)
            return rank.clock.now()

        found = on_sim(main, 2, compute=written(tmp_path, "1s"), stragglers="1x3")
        assert found == pytest.approx([0.5, 1.5])

    def test_a_file_that_was_changed_is_read_again(self, tmp_path: Path) -> None:
        for seconds in (1, 22):
            assert on_sim(steps, 1, compute=written(tmp_path, f"{seconds}s"))[0][0] == pytest.approx(seconds)

    def test_a_step_of_all_waits_for_the_slowest_of_that_step(self, tmp_path: Path) -> None:
        """Each of 3 workers is slow once in three steps: all three together are slow in every step."""
        compute = written(tmp_path, "9s 1s 1s\n1s 9s 1s\n1s 1s 9s\n")
        made = tiny.task(3 * 4 * 6)
        times = dict(compute=compute, latency="0s", bandwidth="1000GB")
        for strategy, expected in (("allreduce", 6 * 9), ("local-sgd:every=3", 2 * 11)):
            result = simulated(made, times, workers=3, strategy=strategy)
            assert result.virtual_seconds == pytest.approx(expected, rel=1e-6)

    def test_all_at_once_takes_as_long(self, tmp_path: Path) -> None:
        compute = written(tmp_path, "1ms 2ms 3ms 5ms\n7ms 4ms 2ms\n")
        runs = [
            tiny.fit(task(), engine=name, sim={"compute": compute}, workers=4, strategy="local-sgd", seed=3)
            for name in ("sim", "fleet")
        ]
        assert runs[0].virtual_seconds == pytest.approx(runs[1].virtual_seconds, rel=1e-12)

    def test_a_run_that_goes_on_plays_on(self, tmp_path: Path) -> None:
        sim = {"compute": written(tmp_path, " ".join(f"{n * n}ms" for n in range(1, 30)))}
        made = tiny.task(24, epochs=3)
        about: dict[str, Any] = dict(workers=2, strategy="server:mode=async", checkpoint_every="1")
        whole = simulated(made, sim, out=tmp_path / "whole", **about)
        simulated(made, sim, out=tmp_path / "part", **about | {"epochs": 2})
        resumed = hocket.resume(tmp_path / "part", task=made, epochs=3, progress=False)
        assert resumed.virtual_seconds == whole.virtual_seconds


class TestRefused:
    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("", "has no times; write a line for each worker"),
            ("# nothing\n\n", "has no times"),
            ("1ms 2ms\n\n1ms soon\n", "line 3 of .* cannot read 'soon' as a time; write it like 2ms"),
            ("1ms -2ms", "line 1 of .* cannot read '-2ms'"),
            ("1ms nan", "cannot read 'nan'"),
            ("1e99", "too long"),
        ],
    )
    @pytest.mark.parametrize("name", ["sim", "fleet"])
    def test_what_is_no_time(self, text: str, says: str, name: str, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=says) as caught:
            engine.make(f"{name}:compute={written(tmp_path, text)}")
        assert str(caught.value).startswith("compute: ") and "\n" not in str(caught.value)

    def test_what_is_no_text(self, tmp_path: Path) -> None:
        (tmp_path / "noise").write_bytes(os.urandom(64) + b"\xff\xfe")
        for path, says in (
            ("noise", "is no text"),
            ("gone", "No such file"),
            (".", "Is a directory"),
            ("a\0b", "no text"),
        ):
            with pytest.raises(UserError, match=f"compute: .*{says}"):
                Sim(compute=f"times:{tmp_path}/{path}")
