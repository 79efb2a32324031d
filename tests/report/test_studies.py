"""`hocket study`: which runs a file stands for, that none is repeated, and what comes of them."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hocket.app import cli
from hocket.core.errors import UserError
from hocket.engines import nodes
from hocket.lab import collectives_study
from hocket.lab import study as lab
from hocket.lab.design import Study, built_in, find, read
from hocket.report import answer, live
from hocket.run.progress import Silent

TINY = """
question = "Which is faster?"
seeds = 2
[settings]
task = "digits"
engine = "sim"
steps = 4
[[grid]]
strategy = "serial"
workers = 1
[[grid]]
strategy = ["allreduce", "gossip"]
workers = [1, 2, 3]
lr = [0.1, 0.2]
[[figure]]
title = "Accuracy"
x = "workers"
y = "metric"
[quick]
seeds = 1
workers = [1, 2]
lr = [0.1]
"""


def written(folder: Path, text: str = TINY) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def asked(study: Study) -> list[tuple[Any, ...]]:
    return [tuple(cell.values.get(name) for name in ("strategy", "workers", "lr")) for cell in study.cells]


def test_a_grid_is_all_combinations_and_quick_narrows_it(tmp_path: Path) -> None:
    whole = read(written(tmp_path), quick=False)
    assert len(whole.cells) == 1 + 2 * 3 * 2 and whole.seeds == 2
    small = read(written(tmp_path), quick=True)
    assert small.seeds == 1
    assert asked(small) == [
        ("serial", 1, None), ("allreduce", 1, 0.1), ("allreduce", 2, 0.1), ("gossip", 1, 0.1), ("gossip", 2, 0.1),
    ]  # fmt: skip


def test_settings_from_the_command_win(tmp_path: Path) -> None:
    study = read(written(tmp_path), True, {"epochs": "2", "lr": "0.7"})
    assert {(cell.spec(0).epochs, cell.spec(0).steps, cell.spec(0).lr) for cell in study.cells} == {(2, None, 0.7)}


def test_runs_take_turns_seed_by_seed(tmp_path: Path) -> None:
    study = read(written(tmp_path), quick=False)
    assert [seed for _, seed in study.runs()] == [0] * 13 + [1] * 13


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        (("question", "qestion"), "did you mean question?"),
        (("steps = 4", "stepps = 4"), "did you mean steps?"),
        (("lr = [0.1, 0.2]", "lrr = [0.1]"), "did you mean lr?"),
        (("steps = 4", 'steps = "four"'), "steps must be a whole number"),
        (("seeds = 1", "seeds = 0"), "seeds must be 1 or more"),
        (("workers = [1, 2]", "worker = [1, 2]"), "of worker, but no [[grid]] has any of these"),
        (("lr = [0.1]", "lr = [0.3]"), "of lr, but no [[grid]] has any of these"),
        (('y = "metric"', 'y = "metrik"'), "did you mean metric?"),
        (('x = "workers"', 'x = "worker"'), "did you mean workers?"),
        (('title = "Accuracy"', ""), "a [[figure]] needs title"),
        (("[[figure]]", "[figure]"), "figure must be [[figure]]"),
        (("question", 'draws = ["rings"]\nquestion'), "did you mean ring?"),
        (("question =", "question"), "is not valid TOML"),
    ],
)
def test_a_file_that_makes_no_sense_is_one_line_and_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: tuple[str, str],
    fragment: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, TINY.replace(*change, 1))
    assert cli.run(["study", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert fragment in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["scalin", "nowhere.toml"])
def test_a_study_that_is_not_there(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["study", name]) == 2
    assert ("did you mean scaling?" if name == "scalin" else "there is no spec file") in capsys.readouterr().err


def test_a_study_leaves_runs_tables_and_a_page_and_repeats_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pandas = pytest.importorskip("pandas")
    out = tmp_path / "out"
    command = ["study", str(written(tmp_path)), "--out", str(out)]
    assert cli.run(command) == 0
    said = capsys.readouterr()
    assert "left out: gossip × 1 sim lr=0.1: " in said.err  # impossible, which stops nobody
    assert "4 runs; table: " in said.out
    frame = pandas.read_csv(out / "table.csv")
    assert list(frame["strategy"]) == ["serial", "allreduce", "allreduce", "gossip"]
    assert list(frame["workers"]) == [1, 1, 2, 2]
    assert len(pandas.read_parquet(out / "table.parquet")) == 4
    page = (out / "report.html").read_text()
    assert "Which is faster?" in page and "Left out" in page
    before = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/result.json")}
    assert len(before) == 4
    assert cli.run(command) == 0
    assert {path: path.stat().st_mtime_ns for path in out.glob("runs/*/result.json")} == before
    assert "4 of 5 runs are there already" in capsys.readouterr().err


def test_a_part_of_a_study_now_and_the_rest_another_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pandas")
    out = tmp_path / "out"
    command = ["study", str(written(tmp_path)), "--out", str(out)]
    for only, fragment in (
        ("workers=7", "--only workers=7 leaves nothing of the study mine; it has 1, 2"),
        ("accumulate=2", "none of its runs sets that"),
        ("engine", "--only must be KEY=VALUE"),
    ):
        assert cli.run([*command, "--only", only]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert fragment in line and not out.exists()
    assert cli.run([*command, "--only", "workers=2", "--only", "strategy=allreduce"]) == 0
    assert "4 of 5 runs, for another time" in capsys.readouterr().err
    (first,) = out.glob("runs/*/result.json")
    assert "4 of 5 runs, for another time" in (out / "report.html").read_text()
    before = first.stat().st_mtime_ns
    assert cli.run(command) == 0
    assert len(list(out.glob("runs/*/result.json"))) == 4 and first.stat().st_mtime_ns == before
    assert "another time" not in (out / "report.html").read_text()


def told(path: Path) -> dict[str, Any]:
    """What a page shows."""
    page: dict[str, Any] = json.loads(path.read_text().partition('id="data">')[2].partition("</script>")[0])
    return page


def shown(page: dict[str, Any]) -> list[Any]:
    """By section: what was left out, and the figures with the names of their lines, in whatever order the runs are."""
    return [
        (
            section["title"],
            section["notes"],
            [(f["title"], {s["name"] for s in f["series"]}) for f in section["figures"]],
        )
        for section in page["sections"]
    ]


def test_a_report_of_a_study_is_the_studys_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its question, its figures and what it left out: from the folder alone."""
    pytest.importorskip("pandas")
    path, out = written(tmp_path, TINY.replace("question", 'draws = ["ring"]\nquestion', 1)), tmp_path / "out"
    assert cli.run(["study", str(path), "--out", str(out)]) == 0
    page = told(out / "report.html")
    assert page["title"] == "study: mine" and page["verdict"][0] == "Which is faster?"
    assert page["sections"][0]["figures"][0]["title"] == "Accuracy"
    assert [section["title"] for section in page["sections"]][1:] == ["How it works", "Left out"]
    assert cli.run(["report", str(out), "--out", str(tmp_path / "again.html")]) == 0
    again = told(tmp_path / "again.html")
    assert (again["title"], again["verdict"], shown(again)) == (page["title"], page["verdict"], shown(page))
    assert live.seen(out)["verdict"] == page["verdict"]
    lab.write_down(out, read(path, True), over=False)
    assert "This study of 5 runs is not over; its command goes on." in live.seen(out)["sections"][-1]["notes"]
    for damage in ("{", '{"study": "mine"}', '{"figures": [{"title": 3}]}', "[]"):
        (out / "study.json").write_text(damage)
        capsys.readouterr()
        assert cli.run(["report", str(out), "--out", str(tmp_path / "again.html")]) == 0
        (line,) = capsys.readouterr().err.splitlines()
        assert "study.json cannot be read, so the study's own figures are left out" in line
        assert told(tmp_path / "again.html")["sections"][0]["figures"]


def test_a_study_without_a_run_has_a_report_too(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    text = 'question = "How?"\n[collectives]\nengines = ["sim"]\nranks = [2, 4]\nsizes = [64]\nrepeats = 1\n'
    out = tmp_path / "out"
    assert cli.run(["study", str(written(tmp_path, text)), "--out", str(out)]) == 0
    page = told(out / "report.html")
    assert cli.run(["report", str(out), "--out", str(tmp_path / "again.html")]) == 0
    assert shown(told(tmp_path / "again.html")) == shown(page) and page["sections"][0]["figures"]


def test_only_what_is_finished_and_asked_for_counts(tmp_path: Path) -> None:
    study = read(written(tmp_path), True)
    study = dataclasses.replace(study, cells=study.cells[:2])
    lab.run(study, tmp_path, Silent())
    (first, second) = (tmp_path / "runs" / cell.folder(0) for cell in study.cells)
    cell = study.cells[0]
    assert lab.finished(first, cell, 0) and not lab.finished(first, cell, 1) and not lab.finished(second, cell, 0)
    for change in ({"verdict": "interrupted"}, None):
        record = json.loads((second / "result.json").read_text())
        (second / "result.json").write_text(json.dumps(record | (change or {}))[: None if change else 10])
        before = os.stat(first / "result.json").st_mtime_ns
        lab.run(study, tmp_path, Silent())
        assert json.loads((second / "result.json").read_text())["verdict"] == "finished"
        assert os.stat(first / "result.json").st_mtime_ns == before


def test_a_crashed_run_is_a_result_and_the_study_goes_on(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "import torch, hocket\n"
        "class Bad(torch.nn.Linear):\n"
        "    seen = 0\n"
        "    def forward(self, x):\n"
        "        Bad.seen += len(x) == 4\n"
        "        if len(x) == 4 and Bad.seen > 9: raise ValueError('enough')\n"
        "        return super().forward(x)\n"
        "x = torch.randn(64, 3)\n"
        "data = (x, (x[:, 0] > 0).long())\n"
        "task = hocket.Task(model=lambda: Bad(3, 2), data=lambda: (data, data), epochs=3)\n"
    )
    text = f'[settings]\ntask = "{tmp_path}/bad.py:task"\nengine = "sim"\n[[grid]]\nbatch = [4, 8]\n'
    outcome = lab.run(read(written(tmp_path, text), False), tmp_path / "out", Silent())
    assert outcome.notes == []
    kept = [json.loads((folder / "result.json").read_text())["verdict"] for folder in outcome.folders]
    assert kept == ["crashed", "finished"]


@pytest.mark.parametrize("name", sorted(built_in()))
@pytest.mark.parametrize("quick", [True, False])
def test_every_study_says_what_it_asks_and_can_be_shown(name: str, quick: bool) -> None:
    study = read(find(name), quick)
    assert study.question.endswith("?")
    assert study.cells or study.collectives
    answer.check(study)


@pytest.mark.parametrize("name", sorted(set(built_in()) - {"collectives"}))
def test_a_tiny_grid_of_every_study(name: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    changes = {"task": "digits", "engine": "sim", "driver": "auto", "epochs": 1, "evaluate_every": 1}
    study = read(find(name), True, changes)
    by_strategy = {cell.values.get("strategy"): cell for cell in study.cells}
    study = dataclasses.replace(study, seeds=1, cells=[study.cells[0], *list(by_strategy.values())[:3]])
    outcome = lab.run(study, tmp_path, Silent())
    assert outcome.folders, outcome.notes
    answer.write_answer(tmp_path, study, outcome.folders, outcome.notes)
    assert {"runs", "table.csv", "table.parquet", "report.html"} <= {path.name for path in tmp_path.iterdir()}


def test_collectives_are_counted(tmp_path: Path) -> None:
    """In steps and bytes that follow from the algorithms; measured once."""
    wanted = {"engines": ["sim"], "ranks": [4, 8], "sizes": [1024], "repeats": 3}
    rows, notes = collectives_study.run(wanted, tmp_path, Silent())
    assert not notes
    steps = {(row["way"], row["ranks"]): row["messages_of_busiest_rank"] for row in rows}
    for p, log in ((4, 2), (8, 3)):
        assert (steps["ring", p], steps["halving", p]) == (2 * (p - 1), 2 * log)
        assert (steps["tree", p], steps["server", p]) == (log, p - 1)
    for row in rows:
        assert row["bytes_sent"] == pytest.approx(2 * (row["ranks"] - 1) * 4096, rel=0.3)  # and some bytes of headers
    written_at = [path.stat().st_mtime_ns for path in tmp_path.glob("measured/*")]
    assert collectives_study.run(wanted, tmp_path, Silent())[0] == rows
    assert [path.stat().st_mtime_ns for path in tmp_path.glob("measured/*")] == written_at


def test_nothing_that_can_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, '[settings]\ntask = "digits"\nengine = "sim"\n[[grid]]\nstrategy = "allreduse"\n')
    assert cli.run(["study", str(path), "--out", str(tmp_path / "out")]) == 2
    assert "did you mean allreduce?" in capsys.readouterr().err.splitlines()[-1]


def test_one_memory_domain_is_why_cells_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "NODES", tmp_path / "nobody-tells")
    study = read(find("memory"), True, {"task": "digits", "steps": 2, "workers": 1})
    real = [cell for cell in study.cells if str(cell.values["engine"]).startswith("threads")]
    outcome = lab.run(dataclasses.replace(study, seeds=1, cells=real), tmp_path / "out", Silent())
    (note,) = outcome.notes
    assert note.count("domains=spread momentum") == 4 and "this machine has one" in note
    assert len(outcome.folders) == 4


def test_what_is_asked_of_the_collectives(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no setting is called 'rank'"):
        collectives_study.run({"rank": [2]}, tmp_path, Silent())
