"""The report: what it says of runs, and that it stays one page whatever is in them."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from told import leave_run

from hocket.app import cli
from hocket.report import charts, formulas, shares
from hocket.report.across import MEASURES, across, measured
from hocket.report.page import page_data, render
from hocket.report.records import comparable, grouped, read_records
from hocket.report.verdict import verdict


def page(path: Path) -> dict[str, Any]:
    records, problems = read_records([path])
    return page_data(records, problems, "title")


def test_medians_are_over_seeds_and_the_range_beside_them(tmp_path: Path) -> None:
    for seed, time in enumerate((1.0, 5.0, 2.0)):
        leave_run(tmp_path / str(seed), seed=seed, time=time)
    (group,) = grouped(read_records([tmp_path])[0])
    figure = charts.time_to_target([group], "time")
    assert figure is not None
    (series,) = figure.series
    assert (series.y, series.low, series.high) == ([2.0], [1.0], [5.0])


def test_a_setting_with_a_run_that_never_got_there_is_shown_as_such_and_does_not_win(tmp_path: Path) -> None:
    leave_run(tmp_path / "a", "serial", seed=0, time=0.1)
    leave_run(tmp_path / "b", "serial", seed=1, time=None)
    leave_run(tmp_path / "c", "allreduce", 2, seed=0, time=7.0)
    groups = grouped(read_records([tmp_path])[0])
    said = " ".join(verdict(groups, "time"))
    assert "reached first by allreduce × 2" in said
    assert "Never got there: serial × 1 (1 of 2)" in said
    figure = charts.time_to_target(groups, "time")
    assert figure is not None
    assert dict(zip(figure.series[0].x, figure.series[0].text, strict=True)) == {
        "allreduce × 2": "7", "serial × 1": "never in 1 of 2",
    }  # fmt: skip
    assert measured(groups[0], "time_to_target") is None
    assert measured(groups[0], "never") == (0.5, 0.5, 0.5)


def test_the_ranges_of_the_first_two_are_compared(tmp_path: Path) -> None:
    for seed in (0, 1):
        leave_run(tmp_path / f"a{seed}", "serial", seed=seed, time=1.0 + 2 * seed)
        leave_run(tmp_path / f"b{seed}", "allreduce", 2, seed=seed, time=2.5 + seed)
    groups = grouped(read_records([tmp_path])[0])
    assert "ranges overlap" in verdict(groups, "time")[0]


def test_speedup_is_against_the_best_run_on_one_worker(tmp_path: Path) -> None:
    leave_run(tmp_path / "slow", "serial", 1, speed=1000.0)
    leave_run(tmp_path / "fast", "allreduce", 1, speed=2000.0)
    leave_run(tmp_path / "two", "allreduce", 2, speed=3000.0)
    figure = charts.speedup(grouped(read_records([tmp_path])[0]), "time")
    assert figure is not None
    ours = next(series for series in figure.series if series.name == "allreduce")
    assert (ours.x, ours.y) == ([1, 2], [1.0, 1.5])


def test_threads_inside_operations_are_cores_of_one_line(tmp_path: Path) -> None:
    for threads, speed in ((1, 1000.0), (2, 1500.0), (4, 2000.0)):
        leave_run(tmp_path / f"serial-{threads}", f"serial:threads={threads}", 1, speed=speed)
        leave_run(tmp_path / f"allreduce-{threads}", "allreduce", threads, speed=0.9 * speed)
    groups = grouped(read_records([tmp_path])[0])
    figure = across(groups, {"title": "t", "x": "cores", "y": "samples_per_s"}, "time", 0)
    assert figure is not None
    assert {one.name: (one.x, one.y) for one in figure.series} == {
        "serial": ([1, 2, 4], [1000.0, 1500.0, 2000.0]),
        "allreduce": ([1, 2, 4], [900.0, 1350.0, 1800.0]),
    }
    speedup = charts.speedup(groups, "time")
    assert speedup is not None and speedup.series[0].y == [0.9, 1.35, 1.8], "against one core, not one worker"


def test_simulated_and_real_runs_are_in_sections_of_their_own(tmp_path: Path) -> None:
    leave_run(tmp_path / "real", "allreduce", 2, time=1.0)
    leave_run(tmp_path / "sim", "allreduce", 2, time=0.001, virtual=True)
    data = page(tmp_path)
    assert [section["title"] for section in data["sections"]] == [
        "digits (measured)", "digits (simulated: times are virtual)",
    ]  # fmt: skip
    assert [len(section["table"]["rows"]) for section in data["sections"]] == [1, 1]
    assert not any("times as fast" in line for line in data["verdict"])


def test_failed_runs_have_no_part_in_medians_and_are_counted(tmp_path: Path) -> None:
    leave_run(tmp_path / "a", seed=0, accuracy=0.9)
    leave_run(tmp_path / "b", seed=1, accuracy=0.1, verdict="diverged", time=None)
    (group,) = grouped(read_records([tmp_path])[0])
    assert group.median("metric") == 0.9
    assert measured(group, "failed") == (0.5, 0.5, 0.5)
    assert any(line.startswith("Diverged: serial × 1 (1 of 2)") for line in verdict([group], "time"))


def test_groups_are_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    for lr in (0.1, 0.2):
        leave_run(tmp_path / str(lr), "allreduce", 2, lr=lr)
    assert [group.name for group in grouped(read_records([tmp_path])[0])] == ["lr=0.1", "lr=0.2"]


def test_an_engines_options_and_entries_of_a_table_tell_groups_apart(tmp_path: Path) -> None:
    """Only those that differ are in a name."""
    for i, place in enumerate(("one", "spread")):
        leave_run(tmp_path / f"real-{i}", "hogwild", 2, engine=f"threads:domains={place}")
        sim = {"compute": "1ms", "domains": str(i + 1)}
        leave_run(tmp_path / f"virtual-{i}", "hogwild", 2, virtual=True, sim=sim, engine="sim")
    records, _ = read_records([tmp_path])
    names = [[group.name for group in groups] for _, _, groups in comparable(records)]
    assert names == [["domains=one", "domains=spread"], ["domains=1", "domains=2"]]


@pytest.mark.parametrize(("lower", "best"), [(False, "0.9, by gossip"), (True, "0.2, by serial")])
def test_the_best_is_what_the_task_says(tmp_path: Path, lower: bool, best: str) -> None:
    for strategy, metric in (("serial", 0.2), ("gossip", 0.9)):
        leave_run(tmp_path / strategy, strategy, 1, accuracy=metric, time=None, lower_is_better=lower)
    records, _ = read_records([tmp_path])
    ((_, clock, groups),) = comparable(records)
    assert f"The best test accuracy in the end was {best}." in verdict(groups, clock)
    reached = measured(groups[0], "epochs_to_target")
    assert reached == ((1, 1, 1) if lower else (3, 3, 3)), "0.8, from 0.3 over 0.6 to 0.9"


def test_damaged_and_foreign_folders_are_named_and_the_rest_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_run(tmp_path / "good")
    (leave_run(tmp_path / "cut") / "result.json").write_text('{"task": "dig')
    (leave_run(tmp_path / "foreign") / "result.json").write_text('{"loss": 1}')
    (leave_run(tmp_path / "spec") / "spec.toml").write_text("= not toml")
    (tmp_path / "empty").mkdir()
    assert cli.run(["report", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "1 run in" in said.out
    for name, why in (("cut", ""), ("foreign", "another version"), ("spec", "")):
        line = next(line for line in said.err.splitlines() if f"{tmp_path / name} " in line)
        assert "cannot be read, and is left out" in line and why in line
    html = (tmp_path / "report.html").read_text()
    assert "Left out" in html and "foreign" in html


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"curve": "none"}, "curve is not a list"),
        ({"curve": [{"epoch": 1, "samples": 5}]}, "a point of its curve has no number of seconds"),
        ({"per_worker": [{"computing": 1.0}]}, "an entry of its per_worker has no number of seconds"),
        ({"workers": "many"}, "workers is not a whole number"),
        ({"shared": 3}, "shared is not a table"),
        ({"time_to_target": True}, "time_to_target is not a number"),
        ({"test_accuracy": [0.9]}, "test_accuracy is not a number"),
        ({"verdict": "well"}, "verdict is not one of reached-target, finished"),
        ({"staleness": {"mean": 1.0, "histogram": {"a": 2}}}, "does not count updates"),
    ],
)
def test_values_of_another_kind_are_named(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    leave_run(tmp_path / "good")
    path = leave_run(tmp_path / "odd") / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    records, (problem,) = read_records([tmp_path])
    assert [record.path.name for record in records] == ["good"]
    assert f"{tmp_path / 'odd'} cannot be read, and is left out: " in problem and why in problem


def test_a_loss_that_is_no_number_is_not_known(tmp_path: Path) -> None:
    path = leave_run(tmp_path / "a") / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"train_loss": float("nan")}))
    assert "NaN" in path.read_text()
    (record,), problems = read_records([tmp_path])
    assert record["train_loss"] is None and not problems
    assert "NaN" not in render(page(tmp_path)).partition('id="data">')[2].partition("</script>")[0]


@pytest.mark.parametrize(
    ("args", "fragment"),
    [
        (["report", "nowhere"], "there is no folder nowhere"),
        (["report", "."], "there is no run in .: a run's folder has a result.json"),
        (["watch", "nowhere"], "there is no folder nowhere to watch"),
        (["watch", ".", "--port", "70000"], "less than or equal to 65535"),
    ],
)
def test_what_cannot_be_reported_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], fragment: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(args) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert fragment in line


HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>"


def test_what_users_wrote_never_becomes_markup(tmp_path: Path) -> None:
    leave_run(tmp_path / "a", strategy="serial", task=f"my {HOSTILE}")
    html = render(page(tmp_path))
    assert html.count("<script") == 2 and html.count("</script") == 2 and "<img" not in html
    data = re.search(r'id="data">(.*?)</script>', html, re.DOTALL)
    assert data is not None and "onerror" in json.loads(data[1])["sections"][0]["title"]


def test_hundreds_of_runs_fit_in_a_page(tmp_path: Path) -> None:
    for number in range(300):
        strategy = ("allreduce", "local-sgd", "hogwild", "server:mode=async")[number % 4]
        leave_run(tmp_path / str(number), strategy, 2 ** (number % 5), number // 60, lr=0.1 + number // 20 % 3)
    html = render(page(tmp_path))
    assert len(html) < 15e6


@pytest.mark.parametrize("measure", MEASURES)
def test_every_measure_can_be_drawn_against_workers(tmp_path: Path, measure: str) -> None:
    for workers in (2, 4):
        leave_run(tmp_path / str(workers), "allreduce", workers)
    groups = grouped(read_records([tmp_path])[0])
    figure = across(groups, {"title": "t", "x": "workers", "y": measure}, "time", 0)
    empty = ("train_metric", "words_per_s", "lock_wait", "distance", "time_to_tenth_loss")
    assert (figure is None) == (measure in empty)
    if figure is not None:
        assert figure.series[0].x == [2, 4] and figure.x.label == "workers"


def test_the_ring_ends_with_all_sums_everywhere_and_never_sends_what_is_not_there() -> None:
    steps = charts.ring_steps(5).cells
    assert len(steps) == 1 + 2 * 4
    assert steps[0]["held"] == [[0.2] * 5] * 5
    assert all(share == pytest.approx(1.0) for row in steps[-1]["held"] for share in row)
    for before, now in itertools.pairwise(steps):
        for rank, chunk in enumerate(now["sends"]):
            if "all-gather" in now["title"]:
                assert before["held"][rank][chunk] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("ranks", "batch_ms", "grid", "ratio"),
    [(8, 72.9, (4, 2), 2.0), (64, 82.0, (8, 8), 4.1), (512, 83.3, (32, 16), 7.4)],
)
def test_the_formulas_of_communication(ranks: int, batch_ms: float, grid: tuple[int, int], ratio: float) -> None:
    """As Gholami 2018 has them for AlexNet."""
    batch = formulas.batch_s(formulas.ALEXNET, ranks)
    seconds, *found = formulas.best_grid(ranks)
    assert 1e3 * batch == pytest.approx(batch_ms, abs=0.06)
    assert tuple(found) == grid
    assert batch / seconds == pytest.approx(ratio, abs=0.06)
    assert formulas.grid_s(formulas.DENSE, 1, ranks) == pytest.approx(formulas.batch_s(formulas.DENSE, ranks))


def test_times_to_different_targets_are_never_in_one_number(tmp_path: Path) -> None:
    cases = ("serial", 0.8, 1.0), ("serial", 0.95, 9.0), ("gossip", 0.8, 2.0), ("gossip", 0.95, 4.0)
    for strategy, target, time in cases:
        path = leave_run(tmp_path / f"{strategy}{target}", strategy, 1, time=time, target=target) / "result.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"target": target}))
    groups = grouped(read_records([tmp_path])[0])
    assert len(groups) == 4
    said = verdict(groups, "time")
    assert said[0].startswith("digits: a test accuracy of 0.8 was reached first by serial target=0.8, in 1 s")
    assert said[1].startswith("A test accuracy of 0.95 was reached first by gossip target=0.95, in 4 s")
    first, second = charts.times_to_targets(groups, "time")
    assert (first.title, first.series[0].y) == ("Time to the target 0.8", [1.0, 2.0])
    assert (second.title, second.series[0].y) == ("Time to the target 0.95", [4.0, 9.0])
    assert first.name != second.name


def test_every_map_of_batch_and_step_has_one_value_a_cell(tmp_path: Path) -> None:
    for i, (momentum, batch, lr) in enumerate(itertools.product((0.0, 0.9), (8, 64), (0.1, 1.0))):
        leave_run(tmp_path / str(i), "hogwild", 2, momentum=momentum, batch=batch, lr=lr)
    maps = charts.heat_maps(grouped(read_records([tmp_path])[0]))
    assert [figure.title for figure in maps] == ["momentum=0.0: test accuracy", "momentum=0.9: test accuracy"]
    assert [len(figure.cells) for figure in maps] == [4, 4]


def test_a_name_leaves_out_what_most_have_in_common(tmp_path: Path) -> None:
    for i, (strategy, lr) in enumerate((("serial", 0.1), ("gossip", 0.1), ("elastic", 0.1), ("serial", 0.2))):
        leave_run(tmp_path / str(i), strategy, 2, lr=lr)
    groups = grouped(read_records([tmp_path])[0])
    assert [group.name for group in groups] == ["serial", "gossip", "elastic", "serial lr=0.2"]
    assert page(tmp_path)["sections"][0]["says"].endswith("Where a name does not say otherwise: lr=0.1.")


def test_settings_of_another_version_may_be_of_any_kind(tmp_path: Path) -> None:
    for i in (1, 2, 3):
        with (leave_run(tmp_path / str(i), lr=i / 10) / "spec.toml").open("a") as file:
            file.write(f"\ncolours = [{i // 3}]\n")
    assert [group.name for group in grouped(read_records([tmp_path])[0])] == [
        "lr=0.1", "lr=0.2", "lr=0.3 colours=[1]",
    ]  # fmt: skip


def test_names_are_never_alike(tmp_path: Path) -> None:
    for driver in ("compiled", "pytorch"):
        path = leave_run(tmp_path / driver, "hogwild", 2, driver=driver) / "result.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"driver": driver}))
    assert [group.name for group in grouped(read_records([tmp_path])[0])] == [
        "hogwild driver=compiled × 2", "hogwild driver=pytorch × 2",
    ]  # fmt: skip


def test_a_curve_goes_on_until_the_last_run_stops(tmp_path: Path) -> None:
    """Who stopped at the target stays where it was; who was cut short ends the line."""
    for seed, points in enumerate((1, 3, 3)):
        path = leave_run(tmp_path / str(seed), seed=seed) / "result.json"
        result = json.loads(path.read_text())
        result |= {"curve": result["curve"][:points], "verdict": "reached-target" if points == 1 else "finished"}
        path.write_text(json.dumps(result))
    groups = grouped(read_records([tmp_path])[0])
    curve = charts.learning(groups, "time")[0].series[0]
    assert (curve.x, curve.y) == ([1, 2, 3], pytest.approx([0.3, 0.6, 0.9]))
    assert curve.low == pytest.approx([0.3, 0.3, 0.3])
    groups[0].records[0].result["verdict"] = "finished"
    assert charts.learning(groups, "time")[0].series[0].x == [1]


def test_a_long_tail_of_staleness_is_left_out(tmp_path: Path) -> None:
    path = leave_run(tmp_path / "a", "hogwild", 2) / "result.json"
    result = json.loads(path.read_text())
    result["staleness"]["histogram"] = {"0": 500, "1": 5000, "2": 500, "255": 1}
    path.write_text(json.dumps(result))
    figure = charts.staleness(grouped(read_records([tmp_path])[0]))
    assert figure is not None and figure.series[0].x == [0, 1, 2] and "stalest 1 %" in figure.says
    result["staleness"]["histogram"] = {"99999999": 5, "2": 5}
    path.write_text(json.dumps(result))
    figure = charts.staleness(grouped(read_records([tmp_path])[0]))
    assert figure is not None and figure.series[0].x == [0, 1, 2, 3, 99999998, 99999999]


def test_the_time_of_each_worker_is_shown(tmp_path: Path) -> None:
    """Over all seeds, so that a slow one is seen; those alone have no figure of their own."""
    leave_run(tmp_path / "alone", "serial", 1)
    for seed in (0, 1):
        path = leave_run(tmp_path / str(seed), "allreduce", 2, seed) / "result.json"
        result = json.loads(path.read_text())
        result["per_worker"][1] |= {"computing": 0.5, "waiting": 2.0}
        path.write_text(json.dumps(result))
    figure = shares.worker_split(grouped(read_records([tmp_path])[0]), "time")
    assert figure is not None
    split = {one.name: one.y for one in figure.series}
    assert figure.series[0].x == ["allreduce × 2, worker 0", "allreduce × 2, worker 1"]
    assert split["computing"] == pytest.approx([2 / 3, 1 / 6])
    assert split["waiting for others"] == pytest.approx([1 / 6, 2 / 3])
