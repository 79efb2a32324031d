"""Going on with a run: what is read, what is refused, and what becomes of the record."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

import hocket
from hocket.app import cli
from hocket.core.comm import Rank
from hocket.drivers import checkpoint
from hocket.drivers.plan import Plan
from hocket.measure.result import TIMES

SETTINGS: dict[str, Any] = dict(strategy="serial", engine="threads", checkpoint_every=1, progress=False)


def report(plan: Plan, curve: list[dict[str, Any]], verdict: str = "finished") -> dict[str, Any]:
    """What a worker reports that did nothing."""
    zero = dict.fromkeys(("seconds", "real_seconds", "samples", "bytes_sent", *TIMES), 0)
    return zero | dict(
        messages=0, steps=plan.steps, steps_done=plan.steps, epochs=1.0, staleness={}, stride=45,
        dropped_events=0, parameters=1, verdict=verdict, diverged_at_step=None, curve=curve, consensus_distance=None,
        losses=[], stretches={}, initial_loss=1.0, tested={},
    )  # fmt: skip


def point(step: int) -> dict[str, Any]:
    epoch, seconds = step / 45, step / 100
    return dict(step=step, epoch=epoch, seconds=seconds, train_loss=1.0, test_loss=None, test_accuracy=0.5)


def write_checkpoint(folder: Path, step: int) -> None:
    path = folder / f"checkpoints/step-{step:010}.safetensors"
    path.write_bytes(checkpoint.pack({"step": step, "steps_per_epoch": 45}, []))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 3 epochs of 45 steps, which got as far as step 90 and whose last checkpoint is from step 45."""
    folder = tmp_path / "run"
    hocket.fit("digits", epochs=3, out=folder, **SETTINGS)
    (folder / "checkpoints").mkdir(exist_ok=True)
    for old in (folder / "checkpoints").iterdir():
        old.unlink()
    write_checkpoint(folder, 45)
    lines = (folder / "curve.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["step", "45", "90", "135"]
    (folder / "curve.csv").write_text("\n".join(lines[:3]) + "\n135,3.0")  # it was killed inside a line
    (folder / "result.json").unlink()
    return folder


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """What the ranks were given; they do nothing but tell the points that remain."""
    seen: list[Plan] = []

    def run_rank(rank: Rank, plan: Plan, *_: Any) -> dict[str, Any]:
        seen.append(plan)
        curve = [point(step) for step in range(90, plan.steps + 1, 45)]
        for each in curve:
            rank.tell("point", each, b"")
        return report(plan, curve)

    monkeypatch.setattr("hocket.run.train.run_rank", run_rank)
    return seen


def steps_of(folder: Path) -> list[int]:
    return [int(row["step"]) for row in csv.DictReader((folder / "curve.csv").open())]


def test_goes_on_from_the_newest_checkpoint_in_the_same_folder(run: Path, plans: list[Plan]) -> None:
    events = (run / "events.jsonl").read_bytes()
    for step in (5, 44):
        write_checkpoint(run, step)
    result = hocket.resume(run, epochs=4, progress=False)
    assert [plan.resume for plan in plans] == [str(run / "checkpoints/step-0000000045.safetensors")]
    assert plans[0].steps == 180
    assert steps_of(run) == [p["step"] for p in result.curve] == [45, 90, 135, 180], (
        "what was cut off comes again, once"
    )
    assert (run / "events.jsonl").read_bytes().startswith(events)
    assert json.loads((run / "result.json").read_text())["curve"] == result.curve
    assert "epochs = 4" in (run / "spec.toml").read_text()


def test_a_run_without_a_checkpoint_starts_again(
    run: Path, plans: list[Plan], capsys: pytest.CaptureFixture[str]
) -> None:
    next((run / "checkpoints").iterdir()).unlink()
    assert cli.run(["resume", str(run)]) == 0
    assert "it starts from the beginning" in capsys.readouterr().err
    assert plans[0].resume == "" and steps_of(run) == [90, 135]


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        (["task=blobs"], "its own task (digits)"),
        (["seed=1"], "its own seed (0)"),
        (["batch=16"], "its own batch (32)"),
        (["optimizer=adam"], "its own optimizer (sgd)"),
        (["strategy=allreduce"], "its own strategy (serial)"),
        (["epoch=5"], "did you mean epochs?"),
        (["epochs=1"], "has done 1 of 1 epochs"),
        (["epochs=4", "steps=9"], "epochs or steps, not both"),
    ],
)
def test_changes_that_make_no_sense(
    changes: list[str], fragment: str, run: Path, plans: list[Plan], capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*.*")}
    assert cli.run(["resume", str(run), *changes]) == 2
    line = capsys.readouterr().err
    assert fragment in line and line.count("\n") == 1
    assert {path: path.read_bytes() for path in run.rglob("*.*")} == before and not plans


@pytest.mark.parametrize(
    ("record", "changes", "fragment"),
    [
        (
            {"verdict": "finished", "steps": 135, "epochs": 3.0},
            {},
            "is finished after 135 steps; give it more, such as epochs=N",
        ),
        ({"verdict": "finished", "steps": 135, "epochs": 3.0}, {"epochs": 4}, ""),
        ({"verdict": "interrupted", "steps": 90, "epochs": 2.0}, {}, ""),
        ({"verdict": "crashed", "steps": None, "epochs": None}, {}, ""),
        (
            {"verdict": "diverged", "steps": 90, "epochs": 2.0},
            {},
            "has diverged; change what made it, such as lr=VALUE",
        ),
        ({"verdict": "diverged", "steps": 90, "epochs": 2.0}, {"lr": 0.01}, ""),
    ],
)
def test_a_run_with_nothing_left_to_do(
    record: dict[str, Any], changes: dict[str, Any], fragment: str, run: Path, plans: list[Plan]
) -> None:
    (run / "result.json").write_text(json.dumps(record))
    if fragment:
        with pytest.raises(hocket.UserError, match=fragment):
            hocket.resume(run, progress=False, **changes)
    else:
        assert hocket.resume(run, progress=False, **changes).verdict == "finished"
    assert len(plans) == (not fragment)


def test_a_run_that_was_to_write_no_checkpoints(tmp_path: Path) -> None:
    hocket.fit("digits", out=tmp_path / "run", **SETTINGS | {"steps": 2, "checkpoint_every": ""})
    with pytest.raises(hocket.UserError, match="no checkpoint to go on from; train anew, with --checkpoint-every 1"):
        hocket.resume(tmp_path / "run", steps=4)


def test_checkpoints_need_a_folder() -> None:
    with pytest.raises(hocket.UserError, match="checkpoints need a folder"):
        hocket.fit("digits", **SETTINGS)


def test_ranks_that_stopped_when_asked_to_are_recorded_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_rank(rank: Rank, plan: Plan, *_: Any) -> dict[str, Any]:
        return report(plan, [point(45)], "interrupted")

    hocket.fit("digits", steps=2, out=tmp_path / "whole", **SETTINGS)
    monkeypatch.setattr("hocket.run.train.run_rank", run_rank)
    with pytest.raises(KeyboardInterrupt):
        hocket.fit("digits", out=tmp_path / "run", **SETTINGS)
    found = json.loads((tmp_path / "run/result.json").read_text())
    assert (found["verdict"], found["parameters"], found["error"]) == ("interrupted", 1, None)
    assert found.keys() == json.loads((tmp_path / "whole/result.json").read_text()).keys()
