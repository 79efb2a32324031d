"""Tasks whose functions raise or give the wrong thing: the user's own line comes first, then one of ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from refusals import TASKS, enter, everything, refusal

from hocket.app import cli

WORDLESS = """
import sys
class Wordless(Exception):
    def __str__(self):
        raise RuntimeError("no words")
def fails(*_):
    raise Wordless
def exits(*_):
    sys.exit("enough")
wordless, leaves, goes = task(loss=fails), task(model=exits), task(data=lambda: sys.exit())
late_wordless, late_leaves = task(on_step=fails), task(on_step=exits)
"""


GIVES = """
no_tensor = task(loss=lambda output, target: 5.0)
no_scalar = task(loss=lambda output, target: output)
no_gradient = task(loss=lambda output, target: output.detach().sum())
no_number = task(metric=lambda output, target: "good")
shape = task(model=lambda: torch.nn.Linear(3, 2))
"""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("name", "whose"),
    [("model", "model"), ("samples", "data"), ("loss", "loss"), ("metric", "metric"), ("forward", "model")],
)
def test_a_users_function_that_raises_shows_the_users_line_first(
    name: str, whose: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("calls.py").write_text(TASKS)
    before = everything()
    assert cli.run(["train", f"calls.py:{name}"]) == 2
    printed = capsys.readouterr()
    *frames, ours = printed.err.splitlines()
    assert ours == f"hocket: Task.{whose} raised KeyError: 'missing'"
    assert 'calls.py", line 5, in broken' in frames[0] and "missing" in frames[1]
    assert "hocket" not in "".join(frames).replace(str(Path("calls.py").resolve()), "")
    assert printed.out == "" and everything() == before


@pytest.mark.parametrize(
    ("name", "status", "line"),
    [
        ("wordless", 2, "Task.loss raised Wordless: its own __str__ raises"),
        ("leaves", 2, "Task.model raised SystemExit: enough"),
        ("goes", 2, "Task.data raised SystemExit"),
        ("late_wordless", 1, "rank 0 failed in start: Wordless: its own __str__ raises"),
        ("late_leaves", 1, "rank 0 failed in start: SystemExit: enough"),
    ],
)
def test_an_error_without_words_and_an_exit_are_told_as_any_other(
    name: str, status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("wordless.py").write_text(TASKS + WORDLESS)
    assert cli.run(["train", f"wordless.py:{name}", "-n", "1", "--engine", "threads"]) == status
    *frames, ours = capsys.readouterr().err.splitlines()
    assert ours == f"hocket: {line}"
    assert 'wordless.py", line' in "".join(frames) and "src/hocket" not in "".join(frames)


@pytest.mark.parametrize(
    ("name", "fragment"),
    [
        ("no_tensor", "Task.loss must return one number as a tensor with a gradient; it gave a float"),
        ("no_scalar", "it gave a tensor of shape [4, 2]"),
        ("no_gradient", "it gave a tensor of shape [] without one"),
        ("no_number", "Task.metric must return one number; it gave a str"),
        ("shape", "Task.model raised RuntimeError: mat1 and mat2"),
    ],
)
def test_a_users_function_that_gives_the_wrong_thing(
    name: str, fragment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("gives.py").write_text(TASKS + GIVES)
    assert fragment in refusal(["train", f"gives.py:{name}"], capsys)


LATE = """
import threading, torch, hocket
data = torch.zeros(64, 2), torch.zeros(64, dtype=torch.long)
calls = []
def loss(output, target):
    if threading.current_thread() is not threading.main_thread() and torch.is_grad_enabled():
        calls.append(1)
        if len(calls) > {after}:
            raise RuntimeError("planted")
    return torch.nn.functional.cross_entropy(output, target)
task = hocket.Task(model=lambda: torch.nn.Linear(2, 2), data=(data, data), loss=loss, batch=4, epochs=100)
"""


@pytest.mark.parametrize(("after", "status"), [(0, 2), (800, 1)])
def test_a_mistake_that_only_a_rank_meets(after: int, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    Path(f"late{after}.py").write_text(LATE.format(after=after))
    assert cli.run(["train", f"late{after}.py:task", "--json", "-n", "1", "--out", "run"]) == status
    printed = capsys.readouterr()
    *frames, ours = printed.err.splitlines()
    assert ours.startswith("hocket: rank 0 failed in ") and ours.endswith("RuntimeError: planted")
    assert f'late{after}.py", line 9, in loss' in frames[0] and "src/hocket" not in "".join(frames)
    record = json.loads(printed.out)
    assert record["verdict"] == "crashed" and "planted" in record["error"]
    assert record == json.loads(Path("run/result.json").read_text())


RAGGED = """
import torch, hocket
class Ragged(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): return torch.zeros(2 if i < 40 else 3), torch.tensor(0)
task = hocket.Task(model=lambda: torch.nn.Linear(2, 2), data=(Ragged(), Ragged()), batch=4, epochs=1)
"""


def test_samples_that_make_no_batch_are_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("ragged.py").write_text(RAGGED)
    assert cli.run(["train", "ragged.py:task", "--engine", "threads"]) == 2
    *_, ours = said = capsys.readouterr().err.splitlines()
    assert ours.startswith("hocket: Task.data: these samples make no batch") and "[2] at entry" in ours
    assert not any("Traceback" in line for line in said)
